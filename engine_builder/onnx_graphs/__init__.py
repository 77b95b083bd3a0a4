"""The networks as ONNX graphs: exported, checked, kept."""

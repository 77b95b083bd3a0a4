"""ONNX graphs to TensorRT plans. Not executed where this was written; see docs/tensorrt.md."""

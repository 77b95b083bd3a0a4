"""The ONNX opsets that graphs are exported in. This module imports no torch."""

OPSET = 23  # the oldest with attention; TensorRT 10.15 and later read it
OLD_OPSET = 17  # the newest that TensorRT 8.6 reads
OPSETS = (OPSET, OLD_OPSET)

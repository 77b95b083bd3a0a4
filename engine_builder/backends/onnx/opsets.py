"""The ONNX opsets that graphs are exported in. This module imports no torch."""

OPSET = 21  # the oldest in which a group norm scales each channel
OLD_OPSET = 17  # the newest that TensorRT 8.6 reads
OPSETS = (OPSET, OLD_OPSET)

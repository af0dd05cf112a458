"""ONNX Runtime and TensorRT custom ops for Transformers: fused softmax, GEMM and attention."""

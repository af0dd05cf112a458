// What the TensorRT adapter needs of the TensorRT that happens to be in the process. The library links none.
#pragma once

#include <NvInferRuntime.h>

#include <span>
#include <string>

namespace ortplugins {

// The creators of all ops, in the order of the specification. They live as long as the process.
std::span<nvinfer1::IPluginCreatorInterface* const> plugin_creators();

// Sends `text` to the logger of the TensorRT that is calling, or, from warnings on, to stderr if there is none.
void log(nvinfer1::ILogger::Severity severity, const std::string& text) noexcept;

// Whether the network alone decides the types of tensors, as it does from TensorRT 11 on. Before, TensorRT tries
// several.
bool types_are_given() noexcept;

}  // namespace ortplugins

// Launchers of the softmax variants; the table in softmax.cc says when each is taken.
#pragma once

#include "kernels/softmax/softmax.h"

namespace ortplugins {

Status launch_softmax_cpu_avx512(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_cpu_avx2(const SoftmaxParams& params, const ExecContext& context);
Status launch_softmax_cpu_generic(const SoftmaxParams& params, const ExecContext& context);

}  // namespace ortplugins

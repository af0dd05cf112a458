// Launchers of the gemm variants; the table in gemm.cc says when each is taken.
#pragma once

#include "kernels/gemm/gemm.h"

namespace ortplugins {

Status launch_gemm_cpu_avx512(const GemmParams& params, const ExecContext& context);
Status launch_gemm_cpu_avx2(const GemmParams& params, const ExecContext& context);
Status launch_gemm_cpu_generic(const GemmParams& params, const ExecContext& context);

}  // namespace ortplugins

// Launchers of the attention variants; the table in attention.cc says when each is taken.
#pragma once

#include "kernels/attention/attention.h"

namespace ortplugins {

Status launch_attention_cpu_avx512(const AttentionParams& params, const ExecContext& context);
Status launch_attention_cpu_avx2(const AttentionParams& params, const ExecContext& context);
Status launch_attention_cpu_generic(const AttentionParams& params, const ExecContext& context);

}  // namespace ortplugins

// Integer division by what the host knows.
#pragma once

#include <cstdint>

namespace ortplugins {

// Division of numbers below 2^31 by a divisor that the host knows: a multiplication, where the compiler's takes 20 instructions.
struct Divisor {
  unsigned multiplier = 1, shift = 0;  // n / d = (n + the high half of n * multiplier) >> shift

  Divisor() = default;
  explicit Divisor(int64_t d) {
    while ((int64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<unsigned>((((int64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ __forceinline__ unsigned quotient(unsigned n) const { return (n + __umulhi(n, multiplier)) >> shift; }
};

}  // namespace ortplugins

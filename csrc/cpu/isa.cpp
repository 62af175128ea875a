#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace hvc {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512"};

Isa best() {
#if defined(HVC_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("sse4.2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx2 && avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::generic;
#else
  return Isa::generic;
#endif
}

Isa decide() {
  const Isa limit = best();
  const char* wanted = std::getenv("HVC_ISA");
  for (int i = 0; wanted && i < int(limit); ++i)
    if (std::strcmp(wanted, kNames[i]) == 0) return Isa(i);
  return limit;
}

}  // namespace

Isa isa() {
  static const Isa chosen = decide();
  return chosen;
}

const char* instruction_set() { return kNames[int(isa())]; }

}  // namespace hvc

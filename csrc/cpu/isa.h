// Which instruction set the loops run on, decided once per process.
#pragma once

namespace hvc {

enum class Isa { generic, avx2, avx512 };

// The best that this processor has, or less when HVC_ISA=generic|avx2 asks for it.
Isa isa();

// The function of that name from the namespace of the chosen instruction set; see foreach_isa.h.
template <class F> inline F choose(F generic, F avx2, F avx512) {
  const Isa chosen = isa();
  return chosen == Isa::avx512 ? avx512 : chosen == Isa::avx2 ? avx2 : generic;
}

}  // namespace hvc

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HVC_X86 1
#define HVC_CHOOSE(...) ::hvc::choose(&generic::__VA_ARGS__, &avx2::__VA_ARGS__, &avx512::__VA_ARGS__)
#else
#define HVC_CHOOSE(...) (&generic::__VA_ARGS__)
#endif

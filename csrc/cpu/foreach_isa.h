// Includes HVC_BODY once per instruction set, in namespaces hvc::generic, hvc::avx2 and hvc::avx512, so that one
// text is compiled for each. target_clones would be shorter, but cannot be overridden for tests, needs ifunc
// support in the loader, and stops at function calls. No `#pragma once`: every family includes it once.
//
// Without a name of its own the inner namespace is the file's alone: only then does the compiler know that a loop's
// body is called once, and put it into the loop. Sketches took a quarter longer otherwise.
//
// fma is left out of the AVX2 list on purpose, and -ffp-contract=off must be given for the AVX-512 one.
#include "isa.h"
#include "kernels.h"
#include "rules/bernoulli.h"
#include "rules/numbers.h"
#include "rules/tree.h"

#include <algorithm>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HVC_INLINE static inline __attribute__((always_inline))

#define HVC_WIDTH 16
namespace hvc::generic {
namespace {
#include "lanes.h"
#include HVC_BODY
}  // namespace
}  // namespace hvc::generic
#undef HVC_WIDTH

#if defined(HVC_X86)

#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,popcnt")
#define HVC_WIDTH 32
namespace hvc::avx2 {
namespace {
#include "lanes.h"
#include HVC_BODY
}  // namespace
}  // namespace hvc::avx2
#undef HVC_WIDTH
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")
#define HVC_WIDTH 64
namespace hvc::avx512 {
namespace {
#include "lanes.h"
#include HVC_BODY
}  // namespace
}  // namespace hvc::avx512
#undef HVC_WIDTH
#pragma GCC pop_options

#endif

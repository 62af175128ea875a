// What lanewise.h needs of a number, and its rules for numbers.
#pragma once
#include <utility>

#include "rules/adam.h"
#include "rules/dense.h"
#include "rules/kept.h"
#include "rules/norm.h"
#include "rules/record.h"
#include "rules/sgd.h"
#include "rules/sign.h"

namespace hvc {

template <class T> struct SameAs {
  using type = T;
};
template <class T> using Same = typename SameAs<T>::type;  // is not deduced

float number_in(float);
double number_in(double);

template <class W> HVC_RULE W choose(bool bit, W yes, W no) { return bit ? yes : no; }
template <class W> HVC_RULE bool at_least(W x, Same<W> bound) { return x >= bound; }
template <class W> HVC_RULE bool below(W x, Same<W> bound) { return x < bound; }
template <class W> HVC_RULE W constant(W, Same<W> value) { return value; }

template <class W> HVC_RULE W magnitude(W x) { return x < 0 ? -x : x; }
template <class W> HVC_RULE W larger(W a, W b);
template <class W> HVC_RULE W limited(W x, Same<W> most);

HVC_RULE float root(float x) { return sqrtf(x); }
HVC_RULE double root(double x) { return sqrt(x); }

// In a namespace of their own, so that no argument of hvc brings them where the rules for lanes are meant.
namespace of_numbers {
#include "rules/lanewise.h"
}
using namespace of_numbers;

template <class W> HVC_RULE W larger(W a, W b) { return larger_part(a, b); }
template <class W> HVC_RULE W limited(W x, Same<W> most) { return limited_part(x, most); }

}  // namespace hvc

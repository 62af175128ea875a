// Rules whose text is compiled for numbers, by rules/numbers.h for the CPU and CUDA, and for 32 lanes of them, by
// cpu/foreach_isa.h in the namespace of each instruction set: X is either, and Bit is a bool or 32 of them.
//
// No #pragma once, and no namespace: both have choose(), at_least(), below(), larger(), limited(), magnitude() and
// constant() for their X, and root() for its parts.

// V is a number, or a vector of them that is part of 32 lanes. NaN stays NaN where it comes first.
template <class V> HVC_RULE V larger_part(const V& a, const V& b) { return b > a ? b : a; }
template <class V> HVC_RULE V limited_part(const V& x, const V& most) {
  return x > most ? most : x < -most ? -most : x;
}

template <class X> using ValueOf = decltype(number_in(std::declval<const X&>()));

// ---- signs ------------------------------------------------------------------------------------------------

// NaN is bit 0, and both zeros count as zero: defined by comparison, not by the sign bit.
template <class X> HVC_RULE auto sign_bit(const X& x) { return at_least(x, 0); }

template <class Bit, class X> HVC_RULE X signed_step(const Bit& bit, const X& step) { return choose(bit, step, -step); }

// Whether x is finite and small enough to be taken in; see kept.h. NaN is not.
template <class X> HVC_RULE auto can_be_kept(const X& x) { return below(magnitude(x), too_large<ValueOf<X>>); }

// The same, but for what is zero.
template <class Bit, class X> HVC_RULE X signed_step_or_zero(const Bit& zero, const Bit& bit, const X& step) {
  return choose(zero, constant(step, 0), signed_step(bit, step));
}

// What is left of x where a value is taken for it: the step of its own sign, or what others' signs made, too.
template <class X> HVC_RULE X less_value(const X& x, const X& value, bool of_others) {
  const X left = x - value;
  return of_others ? limited(left, most_left<ValueOf<X>>) : left;
}

// What a record's scale is made of.
template <class X> HVC_RULE X scale_term(ScaleRule rule, const X& size) { return rule == kRoot ? size * size : size; }

// What a norm adds up: |x|^p, of magnitudes that are 0 for what is not finite.
template <Power kPower, class X> HVC_RULE X raised(const X& size) {
  return kPower == kPower1 ? size : kPower == kPower2 ? size * size : (size * size) * (size * size);
}

// ---- momentum ---------------------------------------------------------------------------------------------

// Two operations, each rounded.
template <class X> HVC_RULE X with_momentum(const X& factor, const X& momentum, const X& grad) {
  const X product = factor * momentum;
  return product + grad;
}

// What is kept with momentum; see dense.h.
template <class X> HVC_RULE X bounded(const X& x) { return limited(x, most_kept<ValueOf<X>>); }

// What to give to Adam: it adds (1 - b2) grad^2 to b2 times this, and then has (1 - b2^t) d^2. Here d^2 is `square`, at
// least `floor`, or more where the first moment would move an element by more than `bound` learning rates. It may be
// less than nothing, but not by more than `taken` of what Adam adds; and not where that overflows, so that Adam stops
// the element. Every operation is rounded by itself.
template <class X>
HVC_RULE X adam_held(const X& first, const X& grad, const X& square, const X& floor, const AdamScales<X>& s) {
  const X zero = constant(first, 0), change = s.share * (grad - first);
  const X least = s.least * (first + change);
  const X d = larger(larger(square, floor), least * least);
  const X wanted = s.wanted * d, coming = s.coming * (grad * grad);
  const X second = wanted - coming, off = s.taken * coming;
  const X under = constant(first, kTiny<ValueOf<X>>) - off, negative = choose(below(under, 0), under, zero);
  const X lowest = choose(below(negative, -most_kept<ValueOf<X>>), zero, negative);
  return larger(lowest, second);
}

// Adam's step, which divides by the root of `square`, at least `floor`, plus eps; by more where an element would move
// by more than `bound` learning rates, and where this gradient alone would make Adam divide by more. V is a number or a
// vector, and every operation is rounded by itself, in the order of torch's fused step.
template <class V, class W> HVC_RULE AdamMoved<V> adam_moved(const V& weight, const V& first, const V& given,
                                                             const V& square, const V& floor, const AdamStep<W>& s) {
  V grad = s.by * given;
  if (s.coupled != 0) grad = grad + s.coupled * weight;  // 0 times a weight that has overflown is no number
  const V change = s.share * (grad - first);
  const V moment = (s.from_grad ? grad : first) + change, least = s.least * moment, coming = s.coming * (grad * grad);
  const V d = larger_part(larger_part(larger_part(square, floor), V(least * least)), coming);
  const V step = s.rate * moment / (root(d) + s.eps);
  return {s.kept * weight - step, moment};
}

// SGD's step, in the order of torch's, every operation rounded by itself. V is a number or a vector. Without a buffer,
// there is no momentum, and `buffer` stays as it is.
template <class V, class W>
HVC_RULE SgdMoved<V> sgd_moved(const V& weight, const V& buffer, const V& given, bool buffered, const SgdStep<W>& s) {
  V grad = s.by * given;
  if (s.decay != 0) grad = grad + s.decay * weight;  // 0 times a weight that has overflown is no number
  if (!buffered) return {weight - s.rate * grad, buffer};
  const V momentum = s.momentum * buffer + s.share * grad;
  return {weight - s.rate * (s.nesterov ? grad + s.momentum * momentum : momentum), momentum};
}

"""Operations on arrays: each checks its arguments once, then runs compiled code.

What a codec or a frame does with memory belongs here. An operation on the tensors of a bucket is a row of
:mod:`.table`, and one tensor is a batch of one; the functions whose names end in ``_all`` take several. Its readable
version is in :mod:`.reference`, the compiled one in csrc, where :mod:`.loader` finds it. Nothing here knows of buckets,
transports or methods.

All tensors are one-dimensional and contiguous. "Bits" are ``torch.int64`` words: bit ``j`` of word
``w`` is element ``64 * w + j``, and padding bits of the last word are always written 0. Results do
not depend on the number of threads, the alignment, the device or the instruction set.

On CUDA tensors the kernels run on the current stream and return at once; a count of non-finite
elements is then a one-element tensor on the device, and only ``int()`` of it waits.

``HVC_KERNELS=reference`` runs the readable NumPy kernels of :mod:`.reference` instead.
"""

from .adam import adam_hold_all
from .checks import crc32c, crc32c_copy, hash64, instruction_set, philox4x32
from .dense import dense_add, dense_decode, dense_decode_all, dense_offer, dense_offer_all, triad
from .dithering import (
    level_add,
    level_decode,
    level_decode_all,
    level_encode,
    level_encode_all,
    level_fold,
    moments_offer,
    moments_offer_all,
    norm_offer,
    norm_offer_all,
    octave_decode,
    octave_decode_all,
    octave_encode,
    octave_encode_all,
    octave_fold,
    octave_merge,
)
from .legality import code_layout, word_count
from .lowrank import lowrank_decode, lowrank_left, lowrank_orthonormalise, lowrank_right, lowrank_start
from .points import points_decode, points_decode_all, points_offer, points_offer_all
from .quantise import (
    elias_bound,
    elias_decode,
    elias_encode,
    qsgd_decode,
    qsgd_decode_all,
    qsgd_encode,
    qsgd_encode_all,
    qsgd_fold,
    qsgd_record_bytes,
)
from .records import RECORD_UNIT, record_bytes, record_decode, record_fold, record_offer
from .shaped import count_rows, shaped_fold, shaped_merge
from .signs import (
    Feedback,
    bernoulli_words,
    majority_fold,
    merge_bits,
    sign_decode,
    sign_decode_all,
    sign_offer,
    sign_offer_all,
    sign_pack,
    sign_unpack,
)
from .sketch import absorb, sketch_clear, sketch_columns, sketch_encode, sketch_estimate, sketch_top
from .sparse import (
    binary_clear,
    binary_decode,
    binary_encode,
    binary_select,
    count_nonfinite,
    golomb_bound,
    golomb_parameter,
    top_select,
)
from .ternary import GROUP_WORDS, PACKED_WORDS, ternary_fold, ternary_states, ternary_unpack
from .values import sample_decode, sample_offer, values_bound, values_decode, values_encode

__all__ = [
    "GROUP_WORDS",
    "PACKED_WORDS",
    "RECORD_UNIT",
    "Feedback",
    "absorb",
    "adam_hold_all",
    "bernoulli_words",
    "binary_clear",
    "binary_decode",
    "binary_encode",
    "binary_select",
    "code_layout",
    "count_nonfinite",
    "count_rows",
    "crc32c",
    "crc32c_copy",
    "dense_add",
    "dense_decode",
    "dense_decode_all",
    "dense_offer",
    "dense_offer_all",
    "elias_bound",
    "elias_decode",
    "elias_encode",
    "golomb_bound",
    "golomb_parameter",
    "hash64",
    "instruction_set",
    "level_add",
    "level_decode",
    "level_decode_all",
    "level_encode",
    "level_encode_all",
    "level_fold",
    "lowrank_decode",
    "lowrank_left",
    "lowrank_orthonormalise",
    "lowrank_right",
    "lowrank_start",
    "majority_fold",
    "merge_bits",
    "moments_offer",
    "moments_offer_all",
    "norm_offer",
    "norm_offer_all",
    "octave_decode",
    "octave_decode_all",
    "octave_encode",
    "octave_encode_all",
    "octave_fold",
    "octave_merge",
    "philox4x32",
    "points_decode",
    "points_decode_all",
    "points_offer",
    "points_offer_all",
    "qsgd_decode",
    "qsgd_decode_all",
    "qsgd_encode",
    "qsgd_encode_all",
    "qsgd_fold",
    "qsgd_record_bytes",
    "record_bytes",
    "record_decode",
    "record_fold",
    "record_offer",
    "sample_decode",
    "sample_offer",
    "shaped_fold",
    "shaped_merge",
    "sign_decode",
    "sign_decode_all",
    "sign_offer",
    "sign_offer_all",
    "sign_pack",
    "sign_unpack",
    "sketch_clear",
    "sketch_columns",
    "sketch_encode",
    "sketch_estimate",
    "sketch_top",
    "ternary_fold",
    "ternary_states",
    "ternary_unpack",
    "top_select",
    "triad",
    "values_bound",
    "values_decode",
    "values_encode",
    "word_count",
]

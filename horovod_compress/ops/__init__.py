"""Operations on arrays: each checks its arguments once, then runs compiled code.

What a codec or a frame does with memory belongs here. Each operation is a row of :mod:`.table`; those whose names end
in ``_all`` take all tensors of a bucket, and one tensor is a batch of one. Its readable version is in
:mod:`.reference`, the compiled one in csrc, where :mod:`.loader` finds it. Nothing here knows of buckets,
transports or methods.

All tensors are one-dimensional and contiguous. "Bits" are ``torch.int64`` words: bit ``j`` of word
``w`` is element ``64 * w + j``, and padding bits of the last word are always written 0. Results do
not depend on the number of threads, the alignment, the device or the instruction set.

On CUDA tensors the kernels run on the current stream and return at once; a count of non-finite
elements is then a one-element tensor on the device, and only ``int()`` of it waits.

``HVC_KERNELS=reference`` runs the readable NumPy kernels of :mod:`.reference` instead.
"""

from .checksums import *
from .dense import *
from .legality import *
from .linear import *
from .quantise import *
from .records import *
from .signs import *
from .sizes import *
from .sparse import *

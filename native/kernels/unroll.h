// Unrolls the loops over the vectors of a register tile, so that the arrays become registers. A macro, so
// that no code is shared between instruction sets.
#pragma once

#ifdef __clang__
#define CAUDAL_UNROLL _Pragma("unroll")
#else
#define CAUDAL_UNROLL _Pragma("GCC unroll 16")
#endif

// The codebooks of the 1-, 2- and 3-bit I types: the vectors of 4 or 8 numbers that a code may stand for.
#pragma once

#include <cstdint>

namespace caudal {

template <int Width>
struct CodeVector {
  int8_t components[Width];
};

const CodeVector<8>* codebook_iq1();      // 2048 entries
const CodeVector<8>* codebook_iq2_xxs();  // 256
const CodeVector<8>* codebook_iq2_xs();   // 512
const CodeVector<8>* codebook_iq2_s();    // 1024
const CodeVector<4>* codebook_iq3_xxs();  // 256
const CodeVector<4>* codebook_iq3_s();    // 512

}  // namespace caudal

// neighbours.h - for the rungs of all ladders: a thread loads or stores several neighbouring elements with
// one instruction.
#pragma once
#include <cstdint>

namespace ladder {

// What a thread can load or store with one instruction: 4, 8 or 16 bytes.
template <int BYTES> struct BitsOf;
template <> struct BitsOf<4> { using Type = uint32_t; };
template <> struct BitsOf<8> { using Type = uint2; };
template <> struct BitsOf<16> { using Type = uint4; };

// N neighbouring elements in the registers of a thread. Their address in memory is a multiple of their size.
template <class Element, int N> struct Neighbours {
    using Bits = typename BitsOf<N * sizeof(Element)>::Type;
    Bits bits;

    static __device__ Neighbours load(const Element* from) { return {*reinterpret_cast<const Bits*>(from)}; }
    __device__ void store(Element* to) const { *reinterpret_cast<Bits*>(to) = bits; }
    __device__ Element& operator[](int j) { return reinterpret_cast<Element*>(&bits)[j]; }
    __device__ const Element& operator[](int j) const { return reinterpret_cast<const Element*>(&bits)[j]; }
};

}  // namespace ladder

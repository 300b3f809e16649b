/*
emulation_load(p), which filter.cpp writes for *reinterpret_cast<const T*>(p). Included by cuda_runtime.h.

The lines of this file have numbers from 1000001 on: by them transactions.cpp knows an access that is whole. Two such accesses
have the same place in the source, and must not be joined for that.
*/
#pragma once

#include <stdint.h>
#include <string.h>
#line 1000001 "emulation/load.h"

// Reads *p by one access of its size. Of a plain copy the compiler may make several, one for each member.
template <class Bits, class T> inline T emulation_load_as(const T* p) {
    typedef Bits __attribute__((may_alias)) AnyBits;
    Bits bits = *reinterpret_cast<const AnyBits*>(p);
    T x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
template <class T> inline T emulation_load(const T* p) {
    if constexpr (sizeof(T) == 16 && alignof(T) == 16) { return emulation_load_as<unsigned __int128>(p); }
    if constexpr (sizeof(T) == 8 && alignof(T) == 8) { return emulation_load_as<uint64_t>(p); }
    if constexpr (sizeof(T) == 4 && alignof(T) == 4) { return emulation_load_as<uint32_t>(p); }
    return *p;
}

// gpu/libraries.h - functions of libraries that are looked up at run time, for several GPUs
// (gpu/transport.cpp) and for attention on Hopper (gpu/attention_sm90.cu).
#pragma once
#include <dlfcn.h>

#include <string>

#include "../common/text.h"

namespace coat::gpu {

// A function of type F in a library that the program does not need in order to start. The library is loaded
// if it was not before. cure: what helps if it is missing.
template <class F> F* library_function(const std::string& library, const char* name, const char* cure) {
    void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const function = loaded ? dlsym(loaded, name) : nullptr;
    if (!function) throw Error(library, " with ", name, " was not found; ", cure, ".");
    return reinterpret_cast<F*>(function);
}
// The library of the CUDA driver, and the cure for a function that it lacks.
inline constexpr char DRIVER[] = "libcuda.so.1", CURE_OLD_DRIVER[] = "install a newer driver";

}  // namespace coat::gpu

// dev/fuzz/safetensors.cpp - fuzzes the safetensors reader: a header that is accepted is true of the file.
#include "../../data/safetensors.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const coat::fuzz::InputFile input("file.safetensors");
    input.write(data, size);
    coat::fuzz::check_reader([&] {
        const coat::Safetensors file(input.path);
        volatile uint8_t sum = 0;
        for (const auto& [name, t] : file.tensors()) {
            if (&file.require(name, t.shape, t.dtype) != &t) std::abort();
            for (int64_t i = 0; i < t.bytes; i++) sum = sum + t.data[i];
        }
    });
    return 0;
}

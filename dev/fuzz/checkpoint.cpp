// dev/fuzz/checkpoint.cpp - fuzzes the JSON files of a model folder. The first byte chooses the file.
#include "../../data/checkpoint.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const coat::fuzz::InputFile files[] = {coat::fuzz::InputFile("config.json"),
                                                  coat::fuzz::InputFile("trainer.json"),
                                                  coat::fuzz::InputFile("model.safetensors.index.json")};
    if (size == 0) return 0;
    const int which = data[0] % 3;
    files[which].write(data + 1, size - 1);
    const std::string folder = files[0].folder();
    coat::fuzz::check_reader([&] {
        if (which == 0) coat::read_model_config(folder);
        if (which == 1) {
            const coat::LoopState state = coat::read_loop_state(folder);
            if (state.step + 1 < 1 || state.tokens + INT32_MAX < 0 || state.position.epoch + 1 < 1)
                std::abort();
        }
        if (which == 2) coat::check_weights(folder, coat::models()[0]);
    });
    return 0;
}

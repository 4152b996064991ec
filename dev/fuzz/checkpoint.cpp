// dev/fuzz/checkpoint.cpp - fuzzes the JSON files of a checkpoint. The first byte chooses the file.
#include "../../data/checkpoint.h"
#include "../../data/files.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const coat::fuzz::InputFile config("config.json"), trainer("trainer.json");
    if (size == 0) return 0;
    const bool is_config = data[0] % 2 == 0;
    std::string text(data + 1, data + size);
    if (!is_config) {  // with the hash that belongs to it, or nothing else would be reached
        nlohmann::json fields = nlohmann::json::parse(text, nullptr, false);
        if (fields.is_object()) {
            fields.erase("hash");
            text = fields.dump();
            const uint64_t hash = coat::hash_bytes(text.data(), int64_t(text.size()), text.size());
            fields["hash"] = std::to_string(hash);
            text = fields.dump();
        }
    }
    (is_config ? config : trainer).write(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    coat::fuzz::check_reader([&] {
        if (is_config) coat::read_model_config(config.folder());
        else if (coat::read_loop_state(config.folder()).step + 1 < 1) std::abort();
    });
    return 0;
}

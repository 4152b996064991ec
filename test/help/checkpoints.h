// checkpoints.h - for the tests of data/: a Model that only stores tensors, small settings, damage to files.
#pragma once
#include <nlohmann/json.hpp>

#include "../../data/checkpoint.h"
#include "../../data/safetensors.h"
#include "../../reference/operators.h"
#include "../../reference/optimizer.h"
#include "files.h"
#include "random.h"

namespace coat::test {

// Random bits, but valid ones: weights and moments finite, only first moments with signs, padding rows zero.
class MemoryModel : public Model {
public:
    MemoryModel(const RunSettings& settings, uint64_t seed) : settings_(settings) {
        Random random(seed);
        for (const auto& table : {weight_tensors(settings.config), tensors_besides_weights(settings)})
            for (const StateTensor& t : table) {
                const bool weight = t.name == t.param.name, k = t.name.ends_with(".k");
                std::string& bytes = tensors[t.name];
                bytes.resize(size_t(owned(settings, t).count * t.bytes));
                for (char& b : bytes) b = char(random.bits());
                // In every format the second bit of the top byte is the first bit of the exponent.
                for (size_t i = t.bytes - 1; i < bytes.size() && t.dtype != std::string("I16"); i += t.bytes)
                    bytes[i] &= weight || t.name.ends_with(".m") ? '\xBF' : '\x3F';
                for (size_t i = 0; k && i < bytes.size(); i += 4) {
                    const float factor = 0.0625f * float(1 + random.below(1024));
                    std::memcpy(&bytes[i], &factor, 4);
                }
                const size_t used = 2 * size_t(used_elements(settings.config, t.param));
                if (weight && used < bytes.size()) std::fill(bytes.begin() + used, bytes.end(), '\0');
            }
    }
    StepResult step(const int32_t*, const int32_t*, const AdamWOptions&) override {
        throw std::logic_error("step");
    }
    double validation_loss(const int32_t*, const int32_t*) override { throw std::logic_error("no losses"); }
    void next_logits(const int32_t*, int64_t, float*) override { throw std::logic_error("no logits"); }
    QuantReport measure_quantization(const int32_t*, const int32_t*) override {
        throw std::logic_error("no report");
    }
    void read(const std::string& name, void* out) override {
        std::memcpy(out, tensors.at(name).data(), tensors.at(name).size());
    }
    void write(const std::string& name, const void* in) override {
        std::memcpy(tensors.at(name).data(), in, tensors.at(name).size()), writes++;
    }
    const RunSettings& settings() const override { return settings_; }
    float master(const Param& p, int64_t i) const {
        uint16_t weight;
        int16_t remainder;
        std::memcpy(&weight, tensors.at(p.name).data() + 2 * i, 2);
        std::memcpy(&remainder, tensors.at(p.name + ".remainder").data() + 2 * i, 2);
        return reference::join_master(weight, remainder);
    }
    std::map<std::string, std::string> tensors;
    int writes = 0;

private:
    RunSettings settings_;
};

inline RunSettings small_settings(const Architecture& arch, bool tied = true,
                                  const char* optimizer = "coat") {
    ModelConfig c{.name = "small",
                  .arch = arch,
                  .L = 2,
                  .C = 32,
                  .NH = 4,
                  .NKV = arch.rope ? 2 : 4,
                  .F = 48,
                  .V = 50,  // rows of the embedding, padded to 64
                  .max_T = 16,
                  .tied = tied};
    if (arch.rope) c.rope_theta = 500000.0f;
    c.norm_eps = 1e-6f;
    return {c, find_row(recipes(), "coat", ""), find_row(optimizers(), optimizer, ""), 1, 16};
}
inline SavedRun some_run(int64_t step) {
    return {{step, step - 1, 5.4321}, {{"data", "text"}, {"lr", 0.003}}};
}
inline std::string save(const std::string& out, Model& model, int64_t step, int64_t keep = 2) {
    return save_checkpoint(out, model, some_run(step), {}, keep);
}

// A few random changes to the first `end` bytes.
inline std::string damaged(std::string bytes, size_t end, Random& random) {
    static const std::string useful = "0123456789-.eE\"{}[],: abFBU\\\xFF";
    for (uint64_t n = random.bits() % 4 + 1; n-- && !bytes.empty();) {
        const size_t at = random.bits() % std::min(end, bytes.size());
        switch (random.bits() % 5) {
            case 0: bytes[at] = char(random.bits()); break;
            case 1: bytes[at] = useful[random.bits() % useful.size()]; break;
            case 2: bytes.resize(at); break;
            case 3: bytes.erase(at, 1 + random.bits() % 4); break;
            case 4: bytes.insert(at, 1, useful[random.bits() % useful.size()]); break;
        }
    }
    return bytes;
}
// Damages a file many times. Each time `read` accepts it, or throws an Error whose message is fit to print and
// names the file's folder. `make sanitize` runs this under AddressSanitizer, which sees reads out of bounds.
inline void check_random_damage(const std::string& path, size_t end, int64_t times, const Action& read) {
    SEEDED_RANDOM(rng);
    const std::string good = read_file(path);
    int64_t rejected = 0;
    for (int64_t i = 0; i < times; i++) {
        write_file(path, damaged(good, end, rng));
        const std::string error = error_of(read);
        if (error.empty()) continue;
        check_error(error, fs::path(path).parent_path().string());
        rejected++;
    }
    CHECK(rejected > 0);
    write_file(path, good);
    read();
}

}  // namespace coat::test

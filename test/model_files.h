// model_files.h - a Model that only stores its tensors, and small setups, for tests of checkpoints and
// safetensors files.
#pragma once
#include <cstring>

#include "../model.h"
#include "../data/checkpoint.h"
#include "../data/file.h"
#include "../data/safetensors.h"
#include "../plan.h"
#include "files.h"
#include "random.h"

namespace coat::test::model_files {

// A safetensors file with this header and so many bytes of data.
inline std::string raw_file(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header +
           std::string(data_bytes, '\1');
}

// Makes random bytes valid for the optimizer state: finite, and only first moments with signs. In every
// format the second bit of the top byte is the first bit of the exponent.
inline void make_valid(const StateTensor& t, Random& random, std::string& bytes) {
    if (t.dtype == std::string("I16")) return;
    for (size_t i = static_cast<size_t>(t.bytes) - 1; i < bytes.size(); i += static_cast<size_t>(t.bytes))
        bytes[i] = static_cast<char>(bytes[i] & (ends_with(t.name, ".m") ? 0xBF : 0x3F));
    for (size_t i = 0; ends_with(t.name, ".k") && i < bytes.size(); i += 4) {
        const float k = 0.0625f * float(1 + random.below(1024));
        std::memcpy(&bytes[i], &k, 4);
    }
}

// A Model that only stores its tensors, with random bits.
class MemoryModel : public Model {
public:
    MemoryModel(const Setup& setup, uint64_t seed) : setup_(setup) {
        Random random(seed);
        for (const auto& table : {weight_tensors(setup.config), optimizer_tensors(setup)})
            for (const StateTensor& t : table) {
                std::string& bytes = tensors_[t.name];
                bytes.resize(static_cast<size_t>(t.total_bytes()));
                for (char& b : bytes) b = static_cast<char>(random.bits());
                if (table.front().name != "embedding") make_valid(t, random, bytes);
            }
        for (const Param& p : parameters(setup.config)) {
            std::string& bytes = tensors_[p.name];
            for (size_t i = 1; i < bytes.size(); i += 2) bytes[i] &= '\xBF';  // weights are finite
            const size_t used = static_cast<size_t>(used_elements(setup.config, p)) * 2;
            // Padding rows are zero.
            std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(used), bytes.end(), '\0');
        }
    }
    StepResult step(const int32_t*, const int32_t*, const AdamW&) override {
        throw std::logic_error("no steps here");
    }
    double evaluate(const int32_t*, const int32_t*) override { throw std::logic_error("no losses here"); }
    void next_logits(const int32_t*, int64_t, float*) override { throw std::logic_error("no logits here"); }
    QuantReport quantization(const int32_t*, const int32_t*) override {
        throw std::logic_error("no quantization here");
    }
    void read(const std::string& name, void* out) override {
        const std::string& bytes = tensors_.at(name);
        std::memcpy(out, bytes.data(), bytes.size());
    }
    void write(const std::string& name, const void* in) override {
        std::string& bytes = tensors_.at(name);
        std::memcpy(bytes.data(), in, bytes.size());
        writes_++;
    }
    const Setup& setup() const override { return setup_; }

    std::map<std::string, std::string>& tensors() { return tensors_; }
    const std::map<std::string, std::string>& tensors() const { return tensors_; }
    int writes() const { return writes_; }
    // The FP32 master of element (r, c): (weight << 16) + remainder, modulo 2^32.
    float master(const Param& p, int64_t r, int64_t c) const {
        uint16_t weight;
        int16_t remainder;
        const size_t at = static_cast<size_t>(r * p.cols + c) * 2;
        std::memcpy(&weight, tensors_.at(p.name).data() + at, 2);
        std::memcpy(&remainder, tensors_.at(p.name + ".remainder").data() + at, 2);
        const uint32_t bits = (uint32_t{weight} << 16) + static_cast<uint32_t>(int32_t{remainder});
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

private:
    Setup setup_;
    std::map<std::string, std::string> tensors_;
    int writes_ = 0;
};

inline ModelConfig small_config(const Architecture& arch, bool tied) {
    // 50 rows of the vocabulary, padded to 64
    ModelConfig c{"small",           arch, 2,  32, 4, arch.rope ? 2 : 4, 48,   50, 16, tied};
    if (arch.rope) c.rope_theta = 500000.0f;
    c.norm_eps = 1e-6f;
    return c;
}

inline Setup small_setup(const Architecture& arch, bool tied = true, const char* optimizer = "coat") {
    return {small_config(arch, tied), find_row(recipes(), "coat", "recipe"),
            find_row(optimizers(), optimizer, "optimizer"), 1, 16};
}

inline const Param& param(const std::vector<Param>& table, const std::string& name) {
    return *std::find_if(table.begin(), table.end(), [&](const Param& p) { return p.name == name; });
}

inline LoopState some_state(int64_t step, const std::string& run = "0123456789abcdef",
                            double validation = std::numeric_limits<double>::quiet_NaN()) {
    return {step, step - 1,  {3, 7}, 12345678901, 5.4321, "{\"lr\": 0.003}", run, validation};
}

}  // namespace coat::test::model_files

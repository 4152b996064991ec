// test_checkpoint_import.cpp - data/model_folder.cpp: model folders in Hugging Face's layout that other
// programs wrote.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "hugging_face_folders.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::hugging_face_folders;
using namespace coat::test::model_files;

TEST_CASE("load_weights: reads a Hugging Face folder of Llama, Mistral or Qwen2, in one file or in shards") {
    for (const HuggingFaceFolder& f : {hugging_face_llama(), hugging_face_mistral(), hugging_face_qwen2()})
        for (int shards : {1, 3}) {
            const std::string type = f.config.at("model_type");
            CAPTURE(type);
            CAPTURE(shards);
            Folder folder;
            f.write(folder.path.string(), shards);
            MemoryModel model = model_of(folder.path.string());
            CHECK(model.setup().config.arch.name == type);
            CHECK(model.setup().config.rope_theta == 12345.0f);
            CHECK(model.setup().config.norm_eps == 1e-6f);
            load_weights(folder.path.string(), model);
            check_llama(model, f);
        }
}

TEST_CASE("load_weights: reads a Hugging Face GPT-2 folder, with or without prefix, and ignores buffers") {
    for (const std::string prefix : {"transformer.", ""}) {
        CAPTURE(prefix);
        HuggingFaceFolder f = hugging_face_gpt2(prefix);
        f.entries.push_back({prefix + "h.0.attn.bias", {16, 16}});
        f.entries.push_back({prefix + "h.0.attn.masked_bias", {1}});
        f.entries.push_back({"lm_head.weight", {50, 32}});  // tied: a copy that is ignored
        Folder folder;
        f.write(folder.path.string());
        MemoryModel model = model_of(folder.path.string());
        CHECK(model.setup().config.F == 128);  // n_inner null is 4 n_embd
        CHECK(model.setup().config.tied);
        load_weights(folder.path.string(), model);
        check_param(model, f, "embedding", same(prefix + "wte.weight"));
        check_param(model, f, "positions", same(prefix + "wpe.weight"));
        check_param(model, f, "final_norm.bias", same(prefix + "ln_f.bias"));
        for (const auto& [ours, theirs] : {std::pair{"qkv", "attn.c_attn"},
                                           {"attention_out", "attn.c_proj"},
                                           {"gate_up", "mlp.c_fc"},
                                           {"down", "mlp.c_proj"}}) {
            check_param(model, f, std::string("layers.0.") + ours,
                        transposed(prefix + "h.0." + theirs + ".weight"));
            check_param(model, f, std::string("layers.0.") + ours + ".bias",
                        same(prefix + "h.0." + theirs + ".bias"));
        }
        for (const auto& [ours, theirs] : {std::pair{"norm1", "ln_1"}, {"norm2", "ln_2"}}) {
            check_param(model, f, std::string("layers.0.") + ours + ".weight",
                        same(prefix + "h.0." + theirs + ".weight"));
            check_param(model, f, std::string("layers.0.") + ours + ".bias",
                        same(prefix + "h.0." + theirs + ".bias"));
        }
    }
}

TEST_CASE("load_weights: F16 and BF16 weights keep their values") {
    for (const auto& [dtype, mask] : {std::pair{"F16", 0xFFFFE000u}, {"BF16", 0xFFFF0000u}}) {
        HuggingFaceFolder f = hugging_face_llama();
        for (HuggingFaceFolder::Entry& e : f.entries) e.dtype = dtype;
        Folder folder;
        f.write(folder.path.string());
        MemoryModel model = model_of(folder.path.string());
        load_weights(folder.path.string(), model);
        const std::vector<Param> table = parameters(model.setup().config);
        int64_t wrong = 0;
        for (int64_t r = 0; r < 50; r++)
            for (int64_t c = 0; c < 32; c++) {
                const float exact = HuggingFaceFolder::value(f.index("lm_head.weight"), r, c);
                uint32_t bits;
                std::memcpy(&bits, &exact, 4);
                bits &= mask;
                float expected;
                std::memcpy(&expected, &bits, 4);
                wrong += model.master(param(table, "head"), r, c) != expected;
            }
        CAPTURE(dtype);
        CHECK(wrong == 0);
    }
}

namespace {

bool is_finite_f16(uint32_t code) { return (code >> 10 & 31) != 31; }

}  // namespace

TEST_CASE("load_weights: all finite F16 values and any F32 value give exact masters") {
    HuggingFaceFolder f = hugging_face_llama();
    f.config["vocab_size"] = 65536 / 32;
    Folder folder;
    f.entries[0] = {"model.embed_tokens.weight", {2048, 32}, "F16"};
    f.entries[f.index("lm_head.weight")] = {"lm_head.weight", {2048, 32}, "F32"};
    f.write(folder.path.string());
    // Overwrites both tensors in place: with every finite F16 code, and with FP32 bit patterns of every kind.
    const std::string path = folder / "model.safetensors";
    std::string bytes = read_file(path);
    const Safetensors file(path);
    const size_t start =
        bytes.size() - static_cast<size_t>(file.tensors().back().data + file.tensors().back().bytes -
                                           file.tensors().front().data);
    auto at = [&](const char* name) {
        return bytes.data() + start + (file.find(name)->data - file.tensors().front().data);
    };
    std::vector<uint32_t> patterns(65536);
    Random random(run_seed());
    for (uint32_t i = 0; i < 65536; i++) {
        patterns[i] = static_cast<uint32_t>(random.bits());
        if (i % 4 == 0) patterns[i] = (i << 16) | 0x8000u;  // a tie: half way between two BF16 values
        if ((patterns[i] & 0x7F800000) >= 0x7F000000) patterns[i] &= 0xBFFFFFFF;  // finite, also as BF16
        const auto half = static_cast<uint16_t>(is_finite_f16(i) ? i : 0);
        std::memcpy(at("model.embed_tokens.weight") + 2 * i, &half, 2);
        std::memcpy(at("lm_head.weight") + 4 * i, &patterns[i], 4);
    }
    write_file(folder / "new", bytes);
    fs::rename(folder / "new", path);
    MemoryModel model = model_of(folder.path.string());
    load_weights(folder.path.string(), model);
    const std::vector<Param> table = parameters(model.setup().config);
    int64_t wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const float head = model.master(param(table, "head"), i / 32, i % 32),
                    half = model.master(param(table, "embedding"), i / 32, i % 32);
        wrong += std::memcmp(&head, &patterns[i], 4) != 0;
        const int exponent = i >> 10 & 31, mantissa = i & 1023;
        const float magnitude = exponent == 0
                                    ? std::ldexp(static_cast<float>(mantissa), -24)
                                    : std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25);
        if (!is_finite_f16(i)) continue;
        wrong += half != (i & 0x8000 ? -magnitude : magnitude);
        wrong += std::signbit(half) != ((i & 0x8000) != 0);
    }
    CHECK(wrong == 0);
}

TEST_CASE("load_weights: with --master none F32 weights are rounded to the nearest BF16") {
    const HuggingFaceFolder f = hugging_face_llama();
    Folder folder;
    f.write(folder.path.string());
    Setup setup = small_setup(LLAMA);
    setup.config = read_model_config(folder.path.string());
    MemoryModel with(setup, 1);
    setup.master = false;
    MemoryModel without(setup, 2);
    load_weights(folder.path.string(), with);
    load_weights(folder.path.string(), without);
    for (const StateTensor& t : weight_tensors(setup.config))
        CHECK(with.tensors().at(t.name) == without.tensors().at(t.name));
}

TEST_CASE("load_weights: NaN and infinity are rejected, also where rounding to BF16 would hide them") {
    HuggingFaceFolder f = hugging_face_llama();
    Folder folder;
    f.write(folder.path.string());
    const std::string path = folder / "model.safetensors", good = read_file(path);
    const Safetensors file(path);
    const Tensor& norm = *file.find("model.norm.weight");
    const size_t at = good.size() - static_cast<size_t>(file.tensors().back().data +
                                                        file.tensors().back().bytes - norm.data);
    // NaN and infinities, NaNs whose upper half would round to zeros, and a finite value that would round to
    // infinity.
    for (uint32_t bits : {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F7FFFFFu}) {
        CAPTURE(bits);
        std::string bad = good;
        std::memcpy(bad.data() + at + 8, &bits, sizeof bits);
        write_file(path, bad);
        MemoryModel model = model_of(folder.path.string());
        check_error([&] { load_weights(folder.path.string(), model); }, path,
                      "model.norm.weight");
    }
}

TEST_CASE("load_weights: weights of the wrong shape are rejected before the model changes") {
    struct Case {
        const char* what;
        std::string named;
        std::function<void(HuggingFaceFolder&)> change;
    };
    const std::vector<Case> cases = {
        {"missing tensor", "mlp.up_proj",
         [](HuggingFaceFolder& f) { f.entries.erase(f.entries.begin() + 6); }},
        {"missing head", "lm_head.weight", [](HuggingFaceFolder& f) { f.entries.pop_back(); }},
        {"wrong shape", "q_proj",
         [](HuggingFaceFolder& f) {
             f.entries[1].shape = {16, 32};
         }},
        {"transposed shape", "down_proj",
         [](HuggingFaceFolder& f) {
             f.entries[7].shape = {48, 32};
         }},
        {"wrong rank", "model.norm",
         [](HuggingFaceFolder& f) {
             f.entries[f.index("model.norm.weight")].shape = {1, 32};
         }},
        {"a bias", "q_proj.bias",
         [](HuggingFaceFolder& f) {
             f.entries.push_back({"model.layers.0.self_attn.q_proj.bias", {32}});
         }},
        {"a layer too many", "layers.1",
         [](HuggingFaceFolder& f) {
             f.entries.push_back({"model.layers.1.input_layernorm.weight", {32}});
         }},
        {"unknown dtype", "I16", [](HuggingFaceFolder& f) { f.entries[2].dtype = "I16"; }},
    };
    for (const Case& c : cases) {
        CAPTURE(c.what);
        for (int shards : {1, 2}) {
            HuggingFaceFolder f = hugging_face_llama();
            c.change(f);
            Folder folder;
            f.write(folder.path.string(), shards);
            MemoryModel model = model_of(folder.path.string());
            check_error([&] { load_weights(folder.path.string(), model); }, folder.path.string(),
                          c.named);
            CHECK(model.writes() == 0);
        }
    }
}

TEST_CASE("load_weights: a Qwen2 folder without a bias, or with one of another size, is rejected") {
    for (bool missing : {true, false}) {
        HuggingFaceFolder f = hugging_face_qwen2();
        if (missing) f.entries.pop_back();
        else f.entries.back().shape = {32};
        Folder folder;
        f.write(folder.path.string());
        MemoryModel model = model_of(folder.path.string());
        check_error([&] { load_weights(folder.path.string(), model); }, folder.path.string(), "v_proj.bias");
        CHECK(model.writes() == 0);
    }
}

TEST_CASE("load_weights: a wrong index of shards is rejected") {
    const HuggingFaceFolder f = hugging_face_llama();
    Folder folder;
    f.write(folder.path.string(), 2);
    MemoryModel model = model_of(folder.path.string());
    const std::string path = folder / "model.safetensors.index.json", good = read_file(path);
    auto rejected = [&](const std::string& index, const std::string& what) {
        write_file(path, index);
        check_error([&] { load_weights(folder.path.string(), model); }, folder.path.string(),
                      what);
    };
    auto with = [&](const std::string& name, const Json& file) {
        Json index = Json::parse(good);
        index["weight_map"][name] = file;
        return index.dump();
    };
    rejected("{}", "weight_map");
    rejected(R"({"weight_map":{}})", "weight_map");
    rejected(R"({"weight_map":[1]})", "weight_map");
    rejected("nonsense", path);
    rejected(with("lm_head.weight", 5), "lm_head.weight");
    rejected(with("lm_head.weight", "../elsewhere.safetensors"), "../elsewhere.safetensors");
    rejected(with("lm_head.weight", "model-00009.safetensors"), "model-00009.safetensors");
    rejected(with("model.more", "model-00001.safetensors"), "model.more");
    CHECK(model.writes() == 0);
    fs::remove(path);
    rejected("", path);
    fs::remove(path);
    check_error([&] { load_weights(folder.path.string(), model); }, folder.path.string(),
                  "safetensors");
}

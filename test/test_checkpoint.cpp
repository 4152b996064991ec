// test_checkpoint.cpp - saving and loading checkpoints in data/checkpoint.cpp: a checkpoint is read back bit
// for bit, and one that does not fit the run is an error.
#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "model_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::model_files;

using Json = nlohmann::ordered_json;

TEST_CASE("checkpoint: is read back bit for bit") {
    for (const Architecture& arch : {LLAMA, MISTRAL, QWEN2, GPT2})
        for (bool tied : {true, false})
            for (const OptimizerFormat& optimizer : optimizers()) {
                CAPTURE(arch.name);
                CAPTURE(tied);
                CAPTURE(optimizer.name);
                Folder folder;
                Setup setup = small_setup(arch, tied, optimizer.name);
                if (arch.rope && tied) {
                    setup.config.head_size = 16;  // other than hidden size / heads
                    setup.config.rope_scaling = {RopeScaling::Llama3, 8.1f, 1.1f, 4.1f, 77};
                } else if (arch.rope) {
                    setup.config.rope_scaling = {RopeScaling::Linear, 2.5f};
                }
                MemoryModel saved(setup, 1), loaded(setup, 2);
                const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(300));
                CHECK(checkpoint == folder / "out/step-000300");
                CHECK(find_checkpoint(folder / "out") == checkpoint);
                CHECK(find_checkpoint(checkpoint) == checkpoint);
                REQUIRE(saved.tensors() != loaded.tensors());
                load_checkpoint(checkpoint, loaded);
                CHECK(saved.tensors() == loaded.tensors());

                const LoopState state = read_loop_state(checkpoint), expected = some_state(300);
                CHECK(state.step == expected.step);
                CHECK(state.updates == expected.updates);
                CHECK(state.position.epoch == expected.position.epoch);
                CHECK(state.position.window == expected.position.window);
                CHECK(state.tokens == expected.tokens);
                CHECK(state.first_validation == expected.first_validation);
                CHECK(state.settings == expected.settings);
                CHECK(state.run == expected.run);

                const ModelConfig config = read_model_config(checkpoint), &c = saved.setup().config;
                CHECK(std::string(config.arch.name) == arch.name);
                CHECK(std::vector<int64_t>{config.L, config.C, config.NH, config.NKV, config.F, config.V,
                                           config.max_T, config.HS(), config.tied} ==
                      std::vector<int64_t>{c.L, c.C, c.NH, c.NKV, c.F, c.V, c.max_T, c.HS(), c.tied});
                CHECK(config.norm_eps == c.norm_eps);
                CHECK(config.rope_theta == (arch.rope ? c.rope_theta : config.rope_theta));
                const RopeScaling &rope = config.rope_scaling, &written = c.rope_scaling;
                CHECK(rope.type == written.type);
                CHECK(std::vector<float>{rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                                         float(rope.original_positions)} ==
                      std::vector<float>{written.factor, written.low_freq_factor, written.high_freq_factor,
                                         float(written.original_positions)});
                CHECK(config.window == 0);
            }
}

TEST_CASE("checkpoint: is read back bit for bit in every memory mode") {
    for (const MemoryMode& mode : memory_modes()) {
        CAPTURE(mode.flag);
        Folder folder;
        Setup setup = small_setup(LLAMA);
        mode.choose(setup, false);
        MemoryModel saved(setup, 1), loaded(setup, 2);
        const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(300));
        load_checkpoint(checkpoint, loaded);
        CHECK(saved.tensors() == loaded.tensors());
        CHECK((Safetensors(checkpoint + "/optimizer.safetensors").find("layers.0.qkv.remainder") !=
               nullptr) == setup.master);
    }
}

TEST_CASE("checkpoint: values that no run can write are rejected before the model changes") {
    const struct {
        const char *optimizer, *tensor;
        std::vector<uint8_t> bits;
    } rows[] = {{"fp32", "layers.0.qkv.m", {0, 0, 0xC0, 0x7F}},
                {"fp32", "layers.0.qkv.v", {0, 0, 0x80, 0x7F}},
                {"fp32", "layers.0.qkv.v", {0, 0, 0x80, 0xBF}},
                {"bf16", "layers.0.qkv.m", {0x80, 0xFF}},
                {"coat", "layers.0.qkv.m", {0xFF}},
                {"coat", "layers.0.qkv.v", {0x7F}},
                {"coat", "layers.0.qkv.v", {0x81}},
                {"coat", "layers.0.qkv.m.max", {0, 0, 0xC0, 0x7F}},
                {"coat", "layers.0.qkv.v.max", {0, 0, 0x80, 0xBF}},
                {"coat", "layers.0.qkv.m.k", {0, 0, 0, 0}},
                {"coat", "layers.0.qkv.v.k", {0, 0, 0x82, 0x42}},
                {"fp8lm", "layers.0.qkv.v", {0, 0x7C}}};
    for (const auto& row : rows) {
        Folder folder;
        Setup setup = small_setup(LLAMA);
        setup.optimizer = find_row(optimizers(), row.optimizer, "--optimizer");
        MemoryModel saved(setup, 1), loaded(setup, 2);
        std::string& bytes = saved.tensors().at(row.tensor);
        std::copy(row.bits.begin(), row.bits.end(), bytes.end() - std::ptrdiff_t(row.bits.size()));
        const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
        CAPTURE(row.tensor);
        check_error([&] { load_checkpoint(checkpoint, loaded); }, checkpoint, row.tensor);
        CHECK(loaded.writes() == 0);
    }
}

TEST_CASE("checkpoint: every field of trainer.json is required") {
    Folder folder;
    MemoryModel saved(small_setup(LLAMA), 1), loaded(small_setup(LLAMA), 2);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    const std::string path = checkpoint + "/trainer.json";
    const Json good = Json::parse(read_file(path));
    auto check = [&](const Json& bad, const std::string& field) {
        CAPTURE(field);
        write_file(path, bad.dump());
        auto load = [&] {
            read_loop_state(checkpoint);
            load_checkpoint(checkpoint, loaded);
        };
        check_error(load, checkpoint, field);
        CHECK(loaded.writes() == 0);
    };
    for (const auto& [field, value] : good.items()) {
        if (value.is_null() || field == "first_validation") continue;  // a loss that is not a number
        Json bad = good;
        bad.erase(field);
        const bool object = value.is_object();
        check(bad, object ? value.begin().key() : field);
        for (size_t i = 0; object && i < value.size(); i++) {
            const std::string inner = std::next(value.begin(), static_cast<std::ptrdiff_t>(i)).key();
            bad = good;
            bad[field].erase(inner);
            check(bad, inner);
        }
    }
    for (const MemoryMode& mode : memory_modes())
        CHECK(good["formats"].contains(mode.flag));
    write_file(path, good.dump());
    load_checkpoint(checkpoint, loaded);
    CHECK(saved.tensors() == loaded.tensors());
    Setup other = small_setup(LLAMA);
    other.master = false;
    MemoryModel lean(other, 3);
    check_error([&] { load_checkpoint(checkpoint, lean); }, checkpoint, "--master exact");
}

TEST_CASE("checkpoint: a validation loss of NaN is read back") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    LoopState state = some_state(1);
    state.first_validation = std::numeric_limits<double>::quiet_NaN();
    CHECK(std::isnan(read_loop_state(save_checkpoint(folder / "out", model, state)).first_validation));
}

TEST_CASE("checkpoint: tensors have the names and shapes of Hugging Face, without padding rows") {
    Folder folder;
    MemoryModel llama(small_setup(LLAMA, false), 1), gpt2(small_setup(GPT2), 2), qwen2(small_setup(QWEN2), 3);
    const Safetensors l(save_checkpoint(folder / "l", llama, some_state(1)) + "/model.safetensors");
    const Safetensors q(save_checkpoint(folder / "q", qwen2, some_state(1)) + "/model.safetensors");
    const Safetensors g(save_checkpoint(folder / "g", gpt2, some_state(1)) + "/model.safetensors");
    auto shapes = [](const Safetensors& file) {
        std::map<std::string, std::vector<int64_t>> result;
        for (const Tensor& t : file.tensors()) {
            CHECK(t.dtype == "BF16");
            if (!contains(t.name, ".1.")) result[t.name] = t.shape;  // layer 1 has the shapes of layer 0
        }
        return result;
    };
    // As LlamaForCausalLM and GPT2LMHeadModel of transformers print them. Conv1D of GPT-2 is (in, out).
    CHECK(shapes(l) == std::map<std::string, std::vector<int64_t>>{
                           {"model.embed_tokens.weight", {50, 32}},
                           {"model.norm.weight", {32}},
                           {"lm_head.weight", {50, 32}},
                           {"model.layers.0.input_layernorm.weight", {32}},
                           {"model.layers.0.post_attention_layernorm.weight", {32}},
                           {"model.layers.0.self_attn.q_proj.weight", {32, 32}},
                           {"model.layers.0.self_attn.k_proj.weight", {16, 32}},
                           {"model.layers.0.self_attn.v_proj.weight", {16, 32}},
                           {"model.layers.0.self_attn.o_proj.weight", {32, 32}},
                           {"model.layers.0.mlp.gate_proj.weight", {48, 32}},
                           {"model.layers.0.mlp.up_proj.weight", {48, 32}},
                           {"model.layers.0.mlp.down_proj.weight", {32, 48}}});
    // Qwen2 has biases as well; tied, it has no head.
    auto expected_qwen2 = shapes(l);
    expected_qwen2.erase("lm_head.weight");
    expected_qwen2["model.layers.0.self_attn.q_proj.bias"] = {32};
    expected_qwen2["model.layers.0.self_attn.k_proj.bias"] = {16};
    expected_qwen2["model.layers.0.self_attn.v_proj.bias"] = {16};
    CHECK(shapes(q) == expected_qwen2);
    CHECK(shapes(g) ==
          std::map<std::string, std::vector<int64_t>>{{"transformer.wte.weight", {50, 32}},
                                                      {"transformer.wpe.weight", {16, 32}},
                                                      {"transformer.ln_f.weight", {32}},
                                                      {"transformer.ln_f.bias", {32}},
                                                      {"transformer.h.0.ln_1.weight", {32}},
                                                      {"transformer.h.0.ln_1.bias", {32}},
                                                      {"transformer.h.0.ln_2.weight", {32}},
                                                      {"transformer.h.0.ln_2.bias", {32}},
                                                      {"transformer.h.0.attn.c_attn.weight", {32, 96}},
                                                      {"transformer.h.0.attn.c_attn.bias", {96}},
                                                      {"transformer.h.0.attn.c_proj.weight", {32, 32}},
                                                      {"transformer.h.0.attn.c_proj.bias", {32}},
                                                      {"transformer.h.0.mlp.c_fc.weight", {32, 48}},
                                                      {"transformer.h.0.mlp.c_fc.bias", {48}},
                                                      {"transformer.h.0.mlp.c_proj.weight", {48, 32}},
                                                      {"transformer.h.0.mlp.c_proj.bias", {32}}});
    CHECK(contains(read_file(l.path()), R"("__metadata__":{"format":"pt"})"));  // transformers requires it
}

TEST_CASE("checkpoint: another shape, version, recipe or optimizer is rejected before the model changes") {
    Folder folder;
    MemoryModel saved(small_setup(LLAMA), 1);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    auto rejected = [&](const Setup& setup, const std::string& what) {
        MemoryModel model(setup, 2);
        check_error([&] { load_checkpoint(checkpoint, model); }, checkpoint, what);
        CHECK(model.writes() == 0);
    };
    Setup other = small_setup(LLAMA);
    other.recipe = find_row(recipes(), "bf16", "recipe");
    rejected(other, "--recipe coat");
    rejected(small_setup(LLAMA, true, "fp8"), "--optimizer coat");
    for (const MemoryMode& mode : memory_modes()) {
        other = small_setup(LLAMA);
        mode.choose(other, false);
        MemoryModel model(other, 2);
        rejected(other, std::string("--") + mode.flag + " " + mode.choices[0].name);
    }
    rejected(small_setup(GPT2), "architecture");
    rejected(small_setup(LLAMA, false), "tie_word_embeddings");
    other = small_setup(LLAMA);
    other.config.L = 3;
    rejected(other, "num_hidden_layers");
    other = small_setup(LLAMA);
    other.config.V = 51;
    rejected(other, "vocab_size");
    other = small_setup(LLAMA);
    other.config.norm_eps *= 2;
    rejected(other, "rms_norm_eps");
    other = small_setup(LLAMA);
    other.config.rope_theta *= 2;
    rejected(other, "rope_theta");
    other = small_setup(LLAMA);
    other.config.rope_scaling = {RopeScaling::Linear, 2};
    rejected(other, "rope_scaling");
    rejected(small_setup(MISTRAL), "architecture");

    const std::string path = checkpoint + "/trainer.json", good = read_file(path);
    for (const auto& [from, to] : {std::pair{"\"version\": 2", "\"version\": 1"},
                                   {"\"step\"", "\"steppe\""},
                                   {"\"window\": 7", "\"window\": -7"},
                                   {"\"settings\"", "\"setting\""},
                                   {"coat checkpoint", "a checkpoint"},
                                   {"{", "["},
                                   {"\"updates\": ", "\"updates\": 99"}}) {
        std::string bad = good;
        bad.replace(bad.find(from), std::strlen(from), to);
        write_file(path, bad);
        check_error([&] { read_loop_state(checkpoint); }, path, "; ");  // after it the cure
    }
}

TEST_CASE("checkpoint: the newest is that of the largest step, whatever the times of its files are") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    const std::string out = folder / "out";
    // The first has the lowest loss, so it stays.
    const std::string best = save_checkpoint(out, model, some_state(10, "0123456789abcdef", 1.0)),
                      last = save_checkpoint(out, model, some_state(20, "0123456789abcdef", 2.0));
    // As after a copy of the folder.
    for (const auto& file : fs::directory_iterator(last))
        fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::hours(1));
    CHECK(find_checkpoint(out) == last);
    // As after a kill while step 20 was saved a second time.
    fs::copy(last, last + ".old", fs::copy_options::recursive);
    CHECK(find_checkpoint(out) == last);
    fs::remove_all(last);
    CHECK(find_checkpoint(out) == last + ".old");
    // The best one stays also if such a kill left it under this name.
    fs::rename(best, best + ".old");
    save_checkpoint(out, model, some_state(30, "0123456789abcdef", 3.0));
    CHECK(read_loop_state(best + ".old").validation == 1.0);
    CHECK(!fs::exists(last + ".old"));
}

TEST_CASE("checkpoint: older ones are removed; later ones are set aside, and other files stay") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    const std::string out = folder / "out";
    auto names = [&] {
        std::vector<std::string> found;
        for (const auto& entry : fs::directory_iterator(out))
            found.push_back(entry.path().filename().string());
        std::sort(found.begin(), found.end());
        return found;
    };
    using Names = std::vector<std::string>;
    for (int64_t step : {10, 20, 30}) save_checkpoint(out, model, some_state(step));
    CHECK(names() == Names{"step-000030"});
    fs::create_directory(out + "/step-notes");
    fs::create_directory(out + "/step-000099.tmp");  // left by a run that was killed
    write_file(out + "/log", "mine");
    save_checkpoint(out, model, some_state(25));
    CHECK(names() == Names{"log", "step-000025", "step-000030.other", "step-notes"});
    CHECK(find_checkpoint(out) == out + "/step-000025");  // the last one written
    MemoryModel changed(small_setup(LLAMA), 7), loaded(small_setup(LLAMA), 8);
    save_checkpoint(out, changed, some_state(25));  // replaces the checkpoint of the same step
    CHECK(names() == Names{"log", "step-000025", "step-000030.other", "step-notes"});
    load_checkpoint(out + "/step-000025", loaded);
    CHECK(loaded.tensors() == changed.tensors());
    save_checkpoint(out, model, some_state(1234567));
    CHECK(names() == Names{"log", "step-000030.other", "step-1234567", "step-notes"});
}

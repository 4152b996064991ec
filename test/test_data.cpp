// test_data.cpp - safetensors files and model folders: what is written comes back, what lies is refused, what is killed halfway
// leaves the last good checkpoint. (Tokens have test_tokens.cpp.)
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "../coat.h"
#include "../data/checkpoint.h"
#include "../data/file.h"
#include "../data/safetensors.h"
#include "../plan.h"
#include "random.h"

using namespace coat;
using coat::test::count;
using coat::test::Random;

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct Folder {  // removed when the test ends
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "coat-data-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~Folder() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
};

std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, const std::string& bytes) {
    fs::remove(path);  // ext4 waits for the disk where a file is cut to nothing and written again, 20,000 times in one test below
    std::ofstream(path, std::ios::binary | std::ios::trunc).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// The error's text; "" if there was none.
std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// One line that names `who` and whatever else is expected in it.
void check_refused(const std::string& error, const std::string& who, const std::string& what = "") {
    CAPTURE(error);
    CHECK(contains(error, who));
    CHECK(contains(error, what));
    CHECK(!contains(error, "\n"));
    CHECK((!error.empty() && error.back() == '.'));
}

// A safetensors file from a header's text and so many bytes of data.
std::string raw_file(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + std::string(data_bytes, '\1');
}

// Random bytes as a run may leave them in its optimizer's state: finite, and only first moments with signs. In every format the top byte's second bit
// is the exponent's first.
void make_sound(const StateTensor& t, Random& random, std::string& bytes) {
    if (t.dtype == std::string("I16")) return;
    for (size_t i = static_cast<size_t>(t.bytes) - 1; i < bytes.size(); i += static_cast<size_t>(t.bytes))
        bytes[i] = static_cast<char>(bytes[i] & (ends_with(t.name, ".m") ? 0xBF : 0x3F));
    for (size_t i = 0; ends_with(t.name, ".k") && i < bytes.size(); i += 4) {
        const float k = 0.0625f * float(1 + random.below(1024));
        std::memcpy(&bytes[i], &k, 4);
    }
}

// A Model that only remembers its tensors.
class MemoryModel : public Model {
public:
    MemoryModel(const Setup& setup, uint64_t seed) : setup_(setup) {
        Random random(seed);
        for (const auto& table : {weight_tensors(setup.config), optimizer_tensors(setup)})
            for (const StateTensor& t : table) {
                std::string& bytes = tensors_[t.name];
                bytes.resize(static_cast<size_t>(t.total_bytes()));
                for (char& b : bytes) b = static_cast<char>(random.bits());
                if (table.front().name != "embedding") make_sound(t, random, bytes);
            }
        for (const Param& p : parameters(setup.config)) {
            std::string& bytes = tensors_[p.name];
            for (size_t i = 1; i < bytes.size(); i += 2) bytes[i] &= '\xBF';  // weights are finite
            const size_t live = static_cast<size_t>(live_elements(setup.config, p)) * 2;
            std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(live), bytes.end(), '\0');  // padding rows are always zero
        }
    }
    StepResult step(const int32_t*, const int32_t*, const AdamW&) override { throw std::logic_error("no steps here"); }
    double evaluate(const int32_t*, const int32_t*) override { throw std::logic_error("no losses here"); }
    void next_logits(const int32_t*, int64_t, float*) override { throw std::logic_error("no logits here"); }
    QuantReport quantization(const int32_t*, const int32_t*) override { throw std::logic_error("no quantization here"); }
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

ModelConfig small_config(const Architecture& arch, bool tied) {
    ModelConfig c{"small", arch, 2, 32, 4, arch.rope ? 2 : 4, 48, 50, 16, tied};  // 50 of 64 rows of the vocabulary are live
    if (arch.rope) c.rope_theta = 500000.0f;
    c.norm_eps = 1e-6f;
    return c;
}

Setup small_setup(const Architecture& arch, bool tied = true, const char* optimizer = "coat") {
    return {small_config(arch, tied), find_row(recipes(), "coat", "recipe"), find_row(optimizers(), optimizer, "optimizer"), 1, 16};
}

const Param& param(const std::vector<Param>& table, const std::string& name) {
    return *std::find_if(table.begin(), table.end(), [&](const Param& p) { return p.name == name; });
}

LoopState some_state(int64_t step, const std::string& run = "0123456789abcdef", double validation = std::numeric_limits<double>::quiet_NaN()) {
    return {step, step - 1, {3, 7}, 12345678901, 5.4321, {1, 0.1 + 0.2, 2e9}, "{\"lr\": 0.003}", run, validation};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// safetensors

TEST_CASE("data: a safetensors file gives back names, types, shapes, bytes and metadata") {
    Folder folder;
    const std::string path = folder / "a.safetensors";
    const std::vector<TensorInfo> tensors = {{"x", "F32", {2, 3}}, {"empty", "I64", {0, 5}}, {"scalar", "BF16", {}}, {"codes \"q\"", "F8_E4M3", {7}}};
    const std::vector<std::string> bytes = {std::string(24, 'x'), "", "ab", "1234567"};
    {
        SafetensorsWriter file(path, tensors, {{"format", "pt"}});
        for (const std::string& b : bytes) file.write(b.data(), static_cast<int64_t>(b.size()));
        file.finish();
    }
    const Safetensors file(path);
    CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
    REQUIRE(file.tensors().size() == tensors.size());
    for (size_t i = 0; i < tensors.size(); i++) {
        const Tensor* t = file.find(tensors[i].name);
        REQUIRE(t);
        CHECK(t->dtype == tensors[i].dtype);
        CHECK(t->shape == tensors[i].shape);
        CHECK(std::string(reinterpret_cast<const char*>(t->data), static_cast<size_t>(t->bytes)) == bytes[i]);
    }
    CHECK(file.find("y") == nullptr);
}

TEST_CASE("data: a writer that does not reach its end leaves no file") {
    Folder folder;
    const std::string path = folder / "a.safetensors";
    { SafetensorsWriter file(path, {{"x", "F32", {2}}}, {}); }
    CHECK(!fs::exists(path));
    SafetensorsWriter file(path, {{"x", "F32", {2}}}, {});
    CHECK_THROWS_AS(file.finish(), std::logic_error);
}

TEST_CASE("data: headers that lie are refused by the file's name") {
    const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";
    struct Case {
        const char* what;
        std::string bytes;
    };
    auto header = [](const char* a, const char* b) { return raw_file(std::string("{\"a\":") + a + ",\"b\":" + b + "}", 12); };
    const char *a = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", *b = R"({"dtype":"U8","shape":[4],"data_offsets":[8,12]})";
    std::string huge = raw_file(good, 12), giant = huge, endless = huge;
    huge[4] = '\1', giant[3] = '\7', endless.replace(0, 8, 8, '\xFF');
    const std::vector<Case> cases = {
        {"empty", ""},
        {"shorter than a length", "1234567"},
        {"header beyond the file", raw_file(good, 0).substr(0, 40)},
        {"header of 4 GB", huge},
        {"header of more than 100 MB", giant},
        {"header of 2^64 - 1 bytes", endless},
        {"no header", raw_file("", 12)},
        {"not JSON", raw_file(good.substr(1), 12)},
        {"not UTF-8", raw_file("{\"\xFF\":1}", 0)},
        {"a zero byte", raw_file(std::string("{}\0", 3), 0)},
        {"more after its end", raw_file("{}{}", 0)},
        {"a list", raw_file("[]", 0)},
        {"a number", raw_file("7", 0)},
        {"deep nesting", raw_file("{\"a\":" + std::string(100000, '['), 0)},
        {"objects in objects", raw_file(R"({"a":{"a":{"a":{}}}})", 0)},
        {"data truncated", raw_file(good, 11)},
        {"data oversized", raw_file(good, 13)},
        {"the same name twice", raw_file("{\"a\":" + std::string(a) + ",\"a\":" + a + "}", 8)},
        {"the same field twice", header(R"({"dtype":"F32","shape":[9],"shape":[2],"data_offsets":[0,8]})", b)},
        {"overlap", header(a, R"({"dtype":"U8","shape":[8],"data_offsets":[4,12]})")},
        {"the same bytes", header(a, R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})")},
        {"hole", header(R"({"dtype":"U8","shape":[7],"data_offsets":[0,7]})", b)},
        {"hole in front", header(R"({"dtype":"U8","shape":[7],"data_offsets":[1,8]})", b)},
        {"shape that is not its bytes", header(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", b)},
        {"dtype that is not its bytes", header(R"({"dtype":"F64","shape":[2],"data_offsets":[0,8]})", b)},
        {"unknown dtype", header(R"({"dtype":"F31","shape":[2],"data_offsets":[0,8]})", b)},
        {"dtype not text", header(R"({"dtype":4,"shape":[2],"data_offsets":[0,8]})", b)},
        {"negative size", header(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", b)},
        {"two negative sizes", header(R"({"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]})", b)},
        {"fraction", header(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", b)},
        {"size that overflows", header(R"({"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,8]})", b)},
        {"size that wraps to its bytes", header(R"({"dtype":"F32","shape":[9223372036854775807,2],"data_offsets":[0,8]})", b)},
        {"size beyond 64 bits", header(R"({"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]})", b)},
        {"shape not a list", header(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", b)},
        {"end before begin", header(R"({"dtype":"U8","shape":[4],"data_offsets":[8,4]})", b)},
        {"negative begin", header(R"({"dtype":"U8","shape":[9],"data_offsets":[-1,8]})", b)},
        {"one offset", header(R"({"dtype":"U8","shape":[8],"data_offsets":[8]})", b)},
        {"three offsets", header(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8,8]})", b)},
        {"no offsets", header(R"({"dtype":"U8","shape":[8]})", b)},
        {"tensor not an object", header("3", b)},
        {"metadata not text", raw_file(R"({"__metadata__":{"a":1}})", 0)},
        {"metadata not an object", raw_file(R"({"__metadata__":"a"})", 0)},
    };
    Folder folder;
    const std::string path = folder / "lie.safetensors";
    write_bytes(path, raw_file(good, 12));
    CHECK(error_of([&] { Safetensors file(path); }) == "");
    for (const Case& c : cases) {
        CAPTURE(c.what);
        write_bytes(path, c.bytes);
        check_refused(error_of([&] { Safetensors file(path); }), path);
    }
    write_bytes(path, giant);
    fs::resize_file(path, 200'000'000);  // as long as it says, though there is nothing in it
    check_refused(error_of([&] { Safetensors file(path); }), path, "100 MB");
    check_refused(error_of([&] { Safetensors file(folder / "none"); }), folder / "none");
    check_refused(error_of([&] { Safetensors file(folder.path.string()); }), folder.path.string());
}

// A few random changes to the first `end` bytes.
static std::string damaged(std::string bytes, size_t end, Random& random) {
    static const std::string likely = "0123456789-.eE\"{}[],: abFBU\\\xFF";
    for (uint64_t n = random.bits() % 4 + 1; n-- && !bytes.empty();) {
        const size_t at = random.bits() % std::min(end, bytes.size());
        switch (random.bits() % 5) {
            case 0: bytes[at] = static_cast<char>(random.bits()); break;
            case 1: bytes[at] = likely[random.bits() % likely.size()]; break;
            case 2: bytes.resize(at); break;
            case 3: bytes.erase(at, 1 + random.bits() % 4); break;
            case 4: bytes.insert(at, 1, likely[random.bits() % likely.size()]); break;
        }
    }
    return bytes;
}

TEST_CASE("data: whatever bytes are changed or cut in a safetensors file, it is read or refused") {
    Folder folder;
    const std::string path = folder / "fuzz.safetensors";
    const std::string good = raw_file(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                      R"("b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]},"c":{"dtype":"U8","shape":[],"data_offsets":[34,35]}})", 35);
    Random random(coat::test::run_seed());
    int64_t refused = 0, touched = 0;
    const int64_t tries = count(20000, 4000);
    for (int64_t i = 0; i < tries; i++) {
        write_bytes(path, damaged(good, good.size(), random));
        const std::string error = error_of([&] {
            const Safetensors file(path);
            for (const Tensor& t : file.tensors())  // every byte that is handed out can be read
                for (int64_t b = 0; b < t.bytes; b++) touched += t.data[b];
        });
        if (!error.empty()) refused++;
        REQUIRE((error.empty() || contains(error, path)));
    }
    CHECK(refused > tries / 2);
    CHECK(refused < tries);
    CHECK(touched > 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

TEST_CASE("data: a checkpoint gives back every bit") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (bool tied : {true, false})
            for (const OptimizerFormat& optimizer : optimizers()) {
                CAPTURE(arch.name);
                CAPTURE(tied);
                CAPTURE(optimizer.name);
                Folder folder;
                Setup setup = small_setup(arch, tied, optimizer.name);
                if (arch.rope && tied) setup.config.head_size = 16;  // not hidden size / heads
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
                CHECK(state.growth == expected.growth);
                CHECK(state.settings == expected.settings);
                CHECK(state.run == expected.run);

                const ModelConfig config = read_model_config(checkpoint), &c = saved.setup().config;
                CHECK(std::string(config.arch.name) == arch.name);
                CHECK(std::vector<int64_t>{config.L, config.C, config.NH, config.NKV, config.F, config.V, config.max_T, config.HS(), config.tied} ==
                      std::vector<int64_t>{c.L, c.C, c.NH, c.NKV, c.F, c.V, c.max_T, c.HS(), c.tied});
                CHECK(config.norm_eps == c.norm_eps);
                CHECK(config.rope_theta == (arch.rope ? c.rope_theta : config.rope_theta));
            }
}

TEST_CASE("data: a checkpoint of every memory mode gives back every bit, and without a master there is no remainder") {
    for (const MemoryMode& mode : memory_modes()) {
        CAPTURE(mode.flag);
        Folder folder;
        Setup setup = small_setup(LLAMA);
        mode.choose(setup, false);
        MemoryModel saved(setup, 1), loaded(setup, 2);
        const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(300));
        load_checkpoint(checkpoint, loaded);
        CHECK(saved.tensors() == loaded.tensors());
        CHECK((Safetensors(checkpoint + "/optimizer.safetensors").find("layers.0.qkv.remainder") != nullptr) == setup.master);
    }
}

TEST_CASE("data: a checkpoint with numbers that no run writes is refused before the model is touched") {
    const struct {
        const char *optimizer, *tensor;
        std::vector<uint8_t> bits;
    } rows[] = {{"fp32", "layers.0.qkv.m", {0, 0, 0xC0, 0x7F}},       {"fp32", "layers.0.qkv.v", {0, 0, 0x80, 0x7F}},  {"fp32", "layers.0.qkv.v", {0, 0, 0x80, 0xBF}},
                {"bf16", "layers.0.qkv.m", {0x80, 0xFF}},             {"coat", "layers.0.qkv.m", {0xFF}},              {"coat", "layers.0.qkv.v", {0x7F}},
                {"coat", "layers.0.qkv.v", {0x81}},                   {"coat", "layers.0.qkv.m.max", {0, 0, 0xC0, 0x7F}}, {"coat", "layers.0.qkv.v.max", {0, 0, 0x80, 0xBF}},
                {"coat", "layers.0.qkv.m.k", {0, 0, 0, 0}},           {"coat", "layers.0.qkv.v.k", {0, 0, 0x82, 0x42}},   {"fp8lm", "layers.0.qkv.v", {0, 0x7C}}};
    for (const auto& row : rows) {
        Folder folder;
        Setup setup = small_setup(LLAMA);
        setup.optimizer = find_row(optimizers(), row.optimizer, "--optimizer");
        MemoryModel saved(setup, 1), loaded(setup, 2);
        std::string& bytes = saved.tensors().at(row.tensor);
        std::copy(row.bits.begin(), row.bits.end(), bytes.end() - std::ptrdiff_t(row.bits.size()));
        const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
        CAPTURE(row.tensor);
        check_refused(error_of([&] { load_checkpoint(checkpoint, loaded); }), checkpoint, row.tensor);
        CHECK(loaded.writes() == 0);
    }
}

TEST_CASE("data: a checkpoint from before there were memory modes is one of the first choices, whose last norm is not known") {
    Folder folder;
    MemoryModel saved(small_setup(LLAMA), 1), loaded(small_setup(LLAMA), 2);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    auto without = [](std::string text, const std::string& begin, const std::string& end) {
        const size_t first = text.find(begin);
        REQUIRE(first != std::string::npos);
        return text.erase(first, text.find(end, first) + end.size() - first);
    };
    const std::string trainer = checkpoint + "/trainer.json", optimizer = checkpoint + "/optimizer.safetensors";
    write_bytes(trainer, without(read_bytes(trainer), "\"growth\"", "],"));
    CHECK(read_loop_state(checkpoint).growth.empty());
    write_bytes(trainer, without(read_bytes(trainer), ",\n  \"hashes\"", "}"));
    std::string bytes = read_bytes(optimizer);
    for (const MemoryMode& mode : memory_modes()) {  // the header's length stays: another key takes the place
        const size_t at = bytes.find("\"" + std::string(mode.flag) + "\"");
        CHECK((at != std::string::npos) == mode.changes_numbers);
        if (at != std::string::npos) bytes[at + 1] = '-';
    }
    write_bytes(optimizer, bytes);
    load_checkpoint(checkpoint, loaded);
    CHECK(saved.tensors() == loaded.tensors());
    Setup other = small_setup(LLAMA);
    other.master = false;
    MemoryModel lean(other, 3);
    check_refused(error_of([&] { load_checkpoint(checkpoint, lean); }), checkpoint, "--master exact");
}

TEST_CASE("data: a first validation that is not a number survives") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    LoopState state = some_state(1);
    state.first_validation = std::numeric_limits<double>::quiet_NaN();
    CHECK(std::isnan(read_loop_state(save_checkpoint(folder / "out", model, state)).first_validation));
}

TEST_CASE("data: the files have Hugging Face's names and shapes, and nothing but live rows") {
    Folder folder;
    MemoryModel llama(small_setup(LLAMA, false), 1), gpt2(small_setup(GPT2), 2);
    const Safetensors l(save_checkpoint(folder / "l", llama, some_state(1)) + "/model.safetensors");
    const Safetensors g(save_checkpoint(folder / "g", gpt2, some_state(1)) + "/model.safetensors");
    auto shapes = [](const Safetensors& file) {
        std::map<std::string, std::vector<int64_t>> result;
        for (const Tensor& t : file.tensors()) {
            CHECK(t.dtype == "BF16");
            if (!contains(t.name, ".1.")) result[t.name] = t.shape;  // layer 1 is as layer 0
        }
        return result;
    };
    // As transformers' LlamaForCausalLM and GPT2LMHeadModel print them; Conv1D of GPT-2 is (in, out).
    CHECK(shapes(l) == std::map<std::string, std::vector<int64_t>>{
        {"model.embed_tokens.weight", {50, 32}}, {"model.norm.weight", {32}}, {"lm_head.weight", {50, 32}},
        {"model.layers.0.input_layernorm.weight", {32}}, {"model.layers.0.post_attention_layernorm.weight", {32}},
        {"model.layers.0.self_attn.q_proj.weight", {32, 32}}, {"model.layers.0.self_attn.k_proj.weight", {16, 32}},
        {"model.layers.0.self_attn.v_proj.weight", {16, 32}}, {"model.layers.0.self_attn.o_proj.weight", {32, 32}},
        {"model.layers.0.mlp.gate_proj.weight", {48, 32}}, {"model.layers.0.mlp.up_proj.weight", {48, 32}},
        {"model.layers.0.mlp.down_proj.weight", {32, 48}}});
    CHECK(shapes(g) == std::map<std::string, std::vector<int64_t>>{
        {"transformer.wte.weight", {50, 32}}, {"transformer.wpe.weight", {16, 32}}, {"transformer.ln_f.weight", {32}}, {"transformer.ln_f.bias", {32}},
        {"transformer.h.0.ln_1.weight", {32}}, {"transformer.h.0.ln_1.bias", {32}}, {"transformer.h.0.ln_2.weight", {32}}, {"transformer.h.0.ln_2.bias", {32}},
        {"transformer.h.0.attn.c_attn.weight", {32, 96}}, {"transformer.h.0.attn.c_attn.bias", {96}},
        {"transformer.h.0.attn.c_proj.weight", {32, 32}}, {"transformer.h.0.attn.c_proj.bias", {32}},
        {"transformer.h.0.mlp.c_fc.weight", {32, 48}}, {"transformer.h.0.mlp.c_fc.bias", {48}},
        {"transformer.h.0.mlp.c_proj.weight", {48, 32}}, {"transformer.h.0.mlp.c_proj.bias", {32}}});
    CHECK(l.metadata().at("format") == "pt");  // transformers insists
}

TEST_CASE("data: config.json says to transformers what the model is") {
    Folder folder;
    MemoryModel llama(small_setup(LLAMA, false), 1), gpt2(small_setup(GPT2), 2);
    const Json l = Json::parse(read_bytes(save_checkpoint(folder / "l", llama, some_state(1)) + "/config.json"));
    const Json g = Json::parse(read_bytes(save_checkpoint(folder / "g", gpt2, some_state(1)) + "/config.json"));
    // By the documented fields of LlamaConfig and GPT2Config.
    const Json expected_llama = {{"architectures", {"LlamaForCausalLM"}}, {"model_type", "llama"}, {"hidden_size", 32}, {"intermediate_size", 48},
                                 {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"head_dim", 8}, {"vocab_size", 50},
                                 {"max_position_embeddings", 16}, {"hidden_act", "silu"}, {"rms_norm_eps", 1e-6}, {"rope_theta", 500000.0},
                                 {"attention_bias", false}, {"mlp_bias", false}, {"tie_word_embeddings", false}, {"torch_dtype", "bfloat16"}};
    const Json expected_gpt2 = {{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"}, {"n_embd", 32}, {"n_inner", 48}, {"n_layer", 2},
                                {"n_head", 4}, {"n_positions", 16}, {"vocab_size", 50}, {"activation_function", "gelu_new"},
                                {"layer_norm_epsilon", 1e-6}, {"tie_word_embeddings", true}, {"torch_dtype", "bfloat16"}};
    for (const auto& [found, expected] : {std::pair{l, expected_llama}, {g, expected_gpt2}})
        for (const auto& [field, value] : expected.items()) {
            CAPTURE(field);
            CHECK(found.value(field, Json()) == value);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Folders that others wrote

namespace {

// A Hugging Face folder whose every value says where it is: tensor number, then row and column in the file.
struct Foreign {
    struct Entry {
        std::string name;
        std::vector<int64_t> shape;
        std::string dtype = "F32";
    };
    std::vector<Entry> entries;
    Json config;

    // 1 + 7 bits of tensor, 6 of row, 7 of column after the leading one: more than BF16 has, so that a remainder is needed.
    static float value(size_t tensor, int64_t row, int64_t col) {
        return 1.0f + (static_cast<float>(tensor) * 8192.0f + static_cast<float>(row) * 128.0f + static_cast<float>(col)) * 0x1p-20f;
    }
    size_t index(const std::string& name) const {
        return static_cast<size_t>(std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.name == name; }) - entries.begin());
    }
    std::string bytes(size_t i) const {
        const Entry& e = entries[i];
        const int64_t rows = e.shape.size() == 2 ? e.shape[0] : 1, cols = e.shape.back();
        std::string out;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const float x = value(i, r, c);
                uint32_t bits;
                std::memcpy(&bits, &x, 4);
                // Between 1 and 2 an F16 is 10 bits of the mantissa over the exponent 15.
                const uint16_t half = static_cast<uint16_t>(15u << 10 | (bits >> 13 & 0x3FF)), bf16 = static_cast<uint16_t>(bits >> 16);
                if (e.dtype == "F32") out.append(reinterpret_cast<const char*>(&bits), 4);
                else out.append(reinterpret_cast<const char*>(e.dtype == "F16" ? &half : &bf16), 2);
            }
        return out;
    }
    void write_weights(const std::string& path, const std::vector<size_t>& which) const {
        std::vector<TensorInfo> tensors;
        for (size_t i : which) tensors.push_back({entries[i].name, entries[i].dtype, entries[i].shape});
        SafetensorsWriter file(path, tensors, {});
        for (size_t i : which) {
            const std::string b = bytes(i);
            file.write(b.data(), static_cast<int64_t>(b.size()));
        }
        file.finish();
    }
    void write(const std::string& folder, int shards = 1) const {
        fs::create_directories(folder);
        write_bytes(folder + "/config.json", config.dump());
        std::vector<std::vector<size_t>> parts(static_cast<size_t>(shards));
        for (size_t i = 0; i < entries.size(); i++) parts[i % parts.size()].push_back(i);
        if (shards == 1) return write_weights(folder + "/model.safetensors", parts[0]);
        Json map;
        for (size_t s = 0; s < parts.size(); s++) {
            const std::string name = "model-0000" + std::to_string(s + 1) + ".safetensors";
            write_weights(folder + "/" + name, parts[s]);
            for (size_t i : parts[s]) map[entries[i].name] = name;
        }
        write_bytes(folder + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
    }
};

Foreign foreign_llama() {
    Foreign f;
    f.entries = {{"model.embed_tokens.weight", {50, 32}}};
    const std::string l = "model.layers.0.";
    for (const auto& [name, rows, cols] : {std::tuple{"self_attn.q_proj", 32, 32}, {"self_attn.k_proj", 16, 32}, {"self_attn.v_proj", 16, 32},
                                           {"self_attn.o_proj", 32, 32}, {"mlp.gate_proj", 48, 32}, {"mlp.up_proj", 48, 32}, {"mlp.down_proj", 32, 48}})
        f.entries.push_back({l + name + ".weight", {rows, cols}});
    for (const char* name : {"model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight", "model.norm.weight"})
        f.entries.push_back({name, {32}});
    f.entries.push_back({"lm_head.weight", {50, 32}});
    f.config = {{"model_type", "llama"}, {"hidden_size", 32}, {"num_hidden_layers", 1}, {"num_attention_heads", 4}, {"num_key_value_heads", 2},
                {"intermediate_size", 48}, {"vocab_size", 50}, {"max_position_embeddings", 16}, {"hidden_act", "silu"}, {"rms_norm_eps", 1e-6},
                {"rope_theta", 12345.0}, {"tie_word_embeddings", false}};
    return f;
}

Foreign foreign_gpt2(const std::string& prefix) {
    Foreign f;
    f.entries = {{prefix + "wte.weight", {50, 32}}, {prefix + "wpe.weight", {16, 32}}};
    const std::string h = prefix + "h.0.";
    for (const auto& [name, in, out] : {std::tuple{"attn.c_attn", 32, 96}, {"attn.c_proj", 32, 32}, {"mlp.c_fc", 32, 128}, {"mlp.c_proj", 128, 32}}) {
        f.entries.push_back({h + name + ".weight", {in, out}});
        f.entries.push_back({h + name + ".bias", {out}});
    }
    for (const std::string& name : {h + "ln_1", h + "ln_2", prefix + "ln_f"})
        for (const char* end : {".weight", ".bias"}) f.entries.push_back({name + end, {32}});
    f.config = {{"model_type", "gpt2"}, {"n_embd", 32}, {"n_layer", 1}, {"n_head", 4}, {"n_inner", nullptr}, {"vocab_size", 50}, {"n_positions", 16},
                {"activation_function", "gelu_new"}, {"resid_pdrop", 0.1}};
    return f;
}

MemoryModel model_of(const std::string& folder) {
    Setup setup = small_setup(LLAMA);
    setup.config = read_model_config(folder);
    return MemoryModel(setup, 9);
}

using Place = std::function<std::tuple<std::string, int64_t, int64_t>(int64_t row, int64_t col)>;  // in the file

void check_param(const MemoryModel& model, const Foreign& f, const std::string& name, const Place& place) {
    const std::vector<Param> table = parameters(model.setup().config);
    const Param& p = param(table, name);
    const int64_t live = live_elements(model.setup().config, p) / p.cols;
    int64_t wrong = 0;
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t c = 0; c < p.cols; c++) {
            float expected = 0;
            if (r < live) {
                const auto [tensor, row, col] = place(r, c);
                REQUIRE(f.index(tensor) < f.entries.size());
                expected = Foreign::value(f.index(tensor), row, col);
            }
            wrong += model.master(p, r, c) != expected;
        }
    CAPTURE(name);
    CHECK(wrong == 0);
}

Place same(const std::string& tensor) {
    return [=](int64_t r, int64_t c) { return std::tuple{tensor, r, c}; };
}
Place transposed(const std::string& tensor) {
    return [=](int64_t r, int64_t c) { return std::tuple{tensor, c, r}; };
}

void check_llama(const MemoryModel& model, const Foreign& f) {
    const std::string l = "model.layers.0.";
    check_param(model, f, "embedding", same("model.embed_tokens.weight"));
    check_param(model, f, "head", same("lm_head.weight"));
    check_param(model, f, "final_norm.gain", same("model.norm.weight"));
    check_param(model, f, "layers.0.norm1.gain", same(l + "input_layernorm.weight"));
    check_param(model, f, "layers.0.norm2.gain", same(l + "post_attention_layernorm.weight"));
    check_param(model, f, "layers.0.attention_out", same(l + "self_attn.o_proj.weight"));
    check_param(model, f, "layers.0.down", same(l + "mlp.down_proj.weight"));
    check_param(model, f, "layers.0.qkv", [&](int64_t r, int64_t c) {
        return r < 32 ? std::tuple{l + "self_attn.q_proj.weight", r, c}
               : r < 48 ? std::tuple{l + "self_attn.k_proj.weight", r - 32, c} : std::tuple{l + "self_attn.v_proj.weight", r - 48, c};
    });
    check_param(model, f, "layers.0.up", [&](int64_t r, int64_t c) {
        return r < 48 ? std::tuple{l + "mlp.gate_proj.weight", r, c} : std::tuple{l + "mlp.up_proj.weight", r - 48, c};
    });
}

}  // namespace

TEST_CASE("data: a Llama folder of others is read, in one file and in shards") {
    const Foreign f = foreign_llama();
    for (int shards : {1, 3}) {
        CAPTURE(shards);
        Folder folder;
        f.write(folder.path.string(), shards);
        MemoryModel model = model_of(folder.path.string());
        CHECK(model.setup().config.rope_theta == 12345.0f);
        CHECK(model.setup().config.norm_eps == 1e-6f);
        load_weights(folder.path.string(), model);
        check_llama(model, f);
    }
}

TEST_CASE("data: a GPT-2 folder of others is read, with and without the prefix, buffers ignored") {
    for (const std::string prefix : {"transformer.", ""}) {
        CAPTURE(prefix);
        Foreign f = foreign_gpt2(prefix);
        f.entries.push_back({prefix + "h.0.attn.bias", {16, 16}});
        f.entries.push_back({prefix + "h.0.attn.masked_bias", {1}});
        f.entries.push_back({"lm_head.weight", {50, 32}});  // tied: a copy that is not needed
        Folder folder;
        f.write(folder.path.string());
        MemoryModel model = model_of(folder.path.string());
        CHECK(model.setup().config.F == 128);  // n_inner null is 4 n_embd
        CHECK(model.setup().config.tied);
        load_weights(folder.path.string(), model);
        check_param(model, f, "embedding", same(prefix + "wte.weight"));
        check_param(model, f, "positions", same(prefix + "wpe.weight"));
        check_param(model, f, "final_norm.bias", same(prefix + "ln_f.bias"));
        for (const auto& [ours, theirs] : {std::pair{"qkv", "attn.c_attn"}, {"attention_out", "attn.c_proj"}, {"up", "mlp.c_fc"}, {"down", "mlp.c_proj"}}) {
            check_param(model, f, std::string("layers.0.") + ours, transposed(prefix + "h.0." + theirs + ".weight"));
            check_param(model, f, std::string("layers.0.") + ours + ".bias", same(prefix + "h.0." + theirs + ".bias"));
        }
        for (const auto& [ours, theirs] : {std::pair{"norm1", "ln_1"}, {"norm2", "ln_2"}}) {
            check_param(model, f, std::string("layers.0.") + ours + ".gain", same(prefix + "h.0." + theirs + ".weight"));
            check_param(model, f, std::string("layers.0.") + ours + ".bias", same(prefix + "h.0." + theirs + ".bias"));
        }
    }
}

TEST_CASE("data: F16 and BF16 weights are read as the values they are") {
    for (const auto& [dtype, mask] : {std::pair{"F16", 0xFFFFE000u}, {"BF16", 0xFFFF0000u}}) {
        Foreign f = foreign_llama();
        for (Foreign::Entry& e : f.entries) e.dtype = dtype;
        Folder folder;
        f.write(folder.path.string());
        MemoryModel model = model_of(folder.path.string());
        load_weights(folder.path.string(), model);
        const std::vector<Param> table = parameters(model.setup().config);
        int64_t wrong = 0;
        for (int64_t r = 0; r < 50; r++)
            for (int64_t c = 0; c < 32; c++) {
                const float whole = Foreign::value(f.index("lm_head.weight"), r, c);
                uint32_t bits;
                std::memcpy(&bits, &whole, 4);
                bits &= mask;
                float expected;
                std::memcpy(&expected, &bits, 4);
                wrong += model.master(param(table, "head"), r, c) != expected;
            }
        CAPTURE(dtype);
        CHECK(wrong == 0);
    }
}

static bool is_finite_f16(uint32_t code) { return (code >> 10 & 31) != 31; }

TEST_CASE("data: all finite F16 values and F32 of every kind become exact masters") {
    Foreign f = foreign_llama();
    f.config["vocab_size"] = 65536 / 32;
    Folder folder;
    f.entries[0] = {"model.embed_tokens.weight", {2048, 32}, "F16"};
    f.entries[f.index("lm_head.weight")] = {"lm_head.weight", {2048, 32}, "F32"};
    f.write(folder.path.string());
    // Overwrite both tensors' bytes in place with every finite F16 code, and with FP32 bit patterns of every kind.
    const std::string path = folder / "model.safetensors";
    std::string bytes = read_bytes(path);
    const Safetensors file(path);
    const size_t start = bytes.size() - static_cast<size_t>(file.tensors().back().data + file.tensors().back().bytes - file.tensors().front().data);
    auto at = [&](const char* name) { return bytes.data() + start + (file.find(name)->data - file.tensors().front().data); };
    std::vector<uint32_t> patterns(65536);
    Random random(coat::test::run_seed());
    for (uint32_t i = 0; i < 65536; i++) {
        patterns[i] = static_cast<uint32_t>(random.bits());
        if (i % 4 == 0) patterns[i] = (i << 16) | 0x8000u;  // the tie: half way between two BF16 values
        if ((patterns[i] & 0x7F800000) >= 0x7F000000) patterns[i] &= 0xBFFFFFFF;  // finite, and as BF16 too
        const auto half = static_cast<uint16_t>(is_finite_f16(i) ? i : 0);
        std::memcpy(at("model.embed_tokens.weight") + 2 * i, &half, 2);
        std::memcpy(at("lm_head.weight") + 4 * i, &patterns[i], 4);
    }
    write_bytes(folder / "new", bytes);
    fs::rename(folder / "new", path);
    MemoryModel model = model_of(folder.path.string());
    load_weights(folder.path.string(), model);
    const std::vector<Param> table = parameters(model.setup().config);
    int64_t wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const float head = model.master(param(table, "head"), i / 32, i % 32), half = model.master(param(table, "embedding"), i / 32, i % 32);
        wrong += std::memcmp(&head, &patterns[i], 4) != 0;
        const int exponent = i >> 10 & 31, mantissa = i & 1023;
        const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24) : std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25);
        if (!is_finite_f16(i)) continue;
        wrong += half != (i & 0x8000 ? -magnitude : magnitude);
        wrong += std::signbit(half) != ((i & 0x8000) != 0);
    }
    CHECK(wrong == 0);
}

TEST_CASE("data: weights in F32 start a run without a master at the nearest BF16") {
    const Foreign f = foreign_llama();
    Folder folder;
    f.write(folder.path.string());
    Setup setup = small_setup(LLAMA);
    setup.config = read_model_config(folder.path.string());
    MemoryModel with(setup, 1);
    setup.master = false;
    MemoryModel without(setup, 2);
    load_weights(folder.path.string(), with);
    load_weights(folder.path.string(), without);
    for (const StateTensor& t : weight_tensors(setup.config)) CHECK(with.tensors().at(t.name) == without.tensors().at(t.name));
}

TEST_CASE("data: weights with NaN or infinity are refused, also where BF16 would hide them") {
    Foreign f = foreign_llama();
    Folder folder;
    f.write(folder.path.string());
    const std::string path = folder / "model.safetensors", good = read_bytes(path);
    const Safetensors file(path);
    const Tensor& norm = *file.find("model.norm.weight");
    const size_t at = good.size() - static_cast<size_t>(file.tensors().back().data + file.tensors().back().bytes - norm.data);
    // NaN and infinities; NaNs whose upper half would round to zeros; a finite number that BF16 would round to infinity
    for (uint32_t bits : {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F7FFFFFu}) {
        CAPTURE(bits);
        std::string bad = good;
        std::memcpy(bad.data() + at + 8, &bits, sizeof bits);
        write_bytes(path, bad);
        MemoryModel model = model_of(folder.path.string());
        check_refused(error_of([&] { load_weights(folder.path.string(), model); }), path, "model.norm.weight");
    }
}

TEST_CASE("data: config.json may leave out what has a default, and keep rope_theta in rope_parameters") {
    Folder folder;
    Foreign f = foreign_llama();
    for (const char* field : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings", "max_position_embeddings"}) f.config.erase(field);
    write_bytes(folder / "config.json", f.config.dump());
    ModelConfig c = read_model_config(folder.path.string());
    CHECK(c.NKV == 4);
    CHECK(c.norm_eps == 1e-6f);
    CHECK(c.rope_theta == 10000.0f);
    CHECK(!c.tied);
    CHECK(c.max_T == 2048);
    f.config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
    f.config["rope_scaling"] = nullptr;
    f.config["head_dim"] = 16;
    write_bytes(folder / "config.json", f.config.dump());
    c = read_model_config(folder.path.string());
    CHECK(c.rope_theta == 500000.0f);
    CHECK(c.HS() == 16);
}

TEST_CASE("data: a config.json that this program does not implement is refused by its field") {
    struct Case {
        const char* field;
        Json value;
    };
    const std::vector<Case> llama = {
        {"model_type", "mistral"}, {"model_type", 3}, {"hidden_act", "gelu"}, {"attention_bias", true}, {"mlp_bias", true},
        {"quantization_config", {{"bits", 4}}}, {"partial_rotary_factor", 0.5}, {"hidden_size", -32}, {"hidden_size", "32"}, {"hidden_size", 1.5},
        {"hidden_size", nullptr}, {"vocab_size", 1e30}, {"rms_norm_eps", "small"}, {"rms_norm_eps", -1}, {"rope_theta", 0}, {"tie_word_embeddings", "yes"},
        {"rope_parameters", 5}};
    const std::vector<Case> gpt2 = {{"activation_function", "gelu"}, {"activation_function", "relu"}, {"scale_attn_weights", false},
                                    {"scale_attn_by_inverse_layer_idx", true}, {"add_cross_attention", true}, {"n_embd", 1 << 25}, {"n_layer", nullptr}};
    Folder folder;
    const std::string path = folder / "config.json";
    auto check = [&](const Foreign& whole, const Case& c) {
        Json config = whole.config;
        config[c.field] = c.value;
        CAPTURE(config[c.field].dump());
        write_bytes(path, config.dump());
        check_refused(error_of([&] { read_model_config(folder.path.string()); }), path, c.field);
    };
    for (const Case& c : llama) check(foreign_llama(), c);
    for (const Case& c : gpt2) check(foreign_gpt2(""), c);

    Foreign f = foreign_llama();
    f.config["rope_scaling"] = {{"rope_type", "llama3"}, {"factor", 8.0}};
    write_bytes(path, f.config.dump());
    check_refused(error_of([&] { read_model_config(folder.path.string()); }), path, "rope_type");
    f.config["rope_scaling"] = nullptr;
    f.config["num_key_value_heads"] = 3;
    write_bytes(path, f.config.dump());
    check_refused(error_of([&] { read_model_config(folder.path.string()); }), folder.path.string(), "heads");
    for (const char* text : {"", "[]", "{", "\xFF"}) {
        write_bytes(path, text);
        check_refused(error_of([&] { read_model_config(folder.path.string()); }), path);
    }
    fs::remove(path);
    check_refused(error_of([&] { read_model_config(folder.path.string()); }), path);
    check_refused(error_of([&] { read_model_config(folder / "none"); }), folder / "none");
}

TEST_CASE("data: weights that do not fit are refused before the model is touched") {
    struct Case {
        const char* what;
        std::string named;
        std::function<void(Foreign&)> spoil;
    };
    const std::vector<Case> cases = {
        {"missing tensor", "mlp.up_proj", [](Foreign& f) { f.entries.erase(f.entries.begin() + 6); }},
        {"missing head", "lm_head.weight", [](Foreign& f) { f.entries.pop_back(); }},
        {"wrong shape", "q_proj", [](Foreign& f) { f.entries[1].shape = {16, 32}; }},
        {"transposed shape", "down_proj", [](Foreign& f) { f.entries[7].shape = {48, 32}; }},
        {"wrong rank", "model.norm", [](Foreign& f) { f.entries[f.index("model.norm.weight")].shape = {1, 32}; }},
        {"a bias", "q_proj.bias", [](Foreign& f) { f.entries.push_back({"model.layers.0.self_attn.q_proj.bias", {32}}); }},
        {"a layer too many", "layers.1", [](Foreign& f) { f.entries.push_back({"model.layers.1.input_layernorm.weight", {32}}); }},
        {"unknown dtype", "I16", [](Foreign& f) { f.entries[2].dtype = "I16"; }},
    };
    for (const Case& c : cases) {
        CAPTURE(c.what);
        for (int shards : {1, 2}) {
            Foreign f = foreign_llama();
            c.spoil(f);
            Folder folder;
            f.write(folder.path.string(), shards);
            MemoryModel model = model_of(folder.path.string());
            check_refused(error_of([&] { load_weights(folder.path.string(), model); }), folder.path.string(), c.named);
            CHECK(model.writes() == 0);
        }
    }
}

TEST_CASE("data: an index of shards that lies is refused") {
    const Foreign f = foreign_llama();
    Folder folder;
    f.write(folder.path.string(), 2);
    MemoryModel model = model_of(folder.path.string());
    const std::string path = folder / "model.safetensors.index.json", good = read_bytes(path);
    auto refused = [&](const std::string& index, const std::string& what) {
        write_bytes(path, index);
        check_refused(error_of([&] { load_weights(folder.path.string(), model); }), folder.path.string(), what);
    };
    auto with = [&](const std::string& name, const Json& file) {
        Json index = Json::parse(good);
        index["weight_map"][name] = file;
        return index.dump();
    };
    refused("{}", "weight_map");
    refused(R"({"weight_map":{}})", "weight_map");
    refused(R"({"weight_map":[1]})", "weight_map");
    refused("nonsense", path);
    refused(with("lm_head.weight", 5), "lm_head.weight");
    refused(with("lm_head.weight", "../elsewhere.safetensors"), "../elsewhere.safetensors");
    refused(with("lm_head.weight", "model-00009.safetensors"), "model-00009.safetensors");
    refused(with("model.more", "model-00001.safetensors"), "model.more");
    CHECK(model.writes() == 0);
    fs::remove(path);
    refused("", path);
    fs::remove(path);
    check_refused(error_of([&] { load_weights(folder.path.string(), model); }), folder.path.string(), "safetensors");
}

// ---------------------------------------------------------------------------------------------------------------------
// What can go wrong with a checkpoint

TEST_CASE("data: a checkpoint of another shape, version, recipe or optimizer is refused before the model is touched") {
    Folder folder;
    MemoryModel saved(small_setup(LLAMA), 1);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    auto refused = [&](const Setup& setup, const std::string& what) {
        MemoryModel model(setup, 2);
        check_refused(error_of([&] { load_checkpoint(checkpoint, model); }), checkpoint, what);
        CHECK(model.writes() == 0);
    };
    Setup other = small_setup(LLAMA);
    other.recipe = find_row(recipes(), "bf16", "recipe");
    refused(other, "--recipe coat");
    refused(small_setup(LLAMA, true, "fp8"), "--optimizer coat");
    other = small_setup(LLAMA);
    other.optimizer.v = Format::E5M2;
    refused(other, "--v-format");
    for (const MemoryMode& mode : memory_modes()) {
        other = small_setup(LLAMA);
        mode.choose(other, false);
        MemoryModel model(other, 2);
        if (mode.changes_numbers) refused(other, std::string("--") + mode.flag + " " + mode.choices[0].name);
        else CHECK_NOTHROW(load_checkpoint(checkpoint, model));
    }
    refused(small_setup(GPT2), "architecture");
    refused(small_setup(LLAMA, false), "tied");
    other = small_setup(LLAMA);
    other.config.L = 3;
    refused(other, "layers");
    other = small_setup(LLAMA);
    other.config.V = 51;
    refused(other, "vocabulary");
    other = small_setup(LLAMA);
    other.config.norm_eps *= 2;
    refused(other, "norm epsilon");
    other = small_setup(LLAMA);
    other.config.rope_theta *= 2;
    refused(other, "RoPE theta");

    const std::string path = checkpoint + "/trainer.json", good = read_bytes(path);
    for (const auto& [from, to] : {std::pair{"\"version\": 1", "\"version\": 2"}, {"\"step\"", "\"steppe\""}, {"\"window\": 7", "\"window\": -7"},
                                   {"\"settings\"", "\"setting\""}, {"coat checkpoint", "a checkpoint"}, {"{", "["}, {"\"growth\": [", "\"growth\": [-1,"},
                                   {"\"growth\": [", "\"growth\": [true,"}, {"\"growth\": ", "\"growth\": true, \"_\": "}, {"\"updates\": ", "\"updates\": 99"}}) {
        std::string bad = good;
        bad.replace(bad.find(from), std::strlen(from), to);
        write_bytes(path, bad);
        check_refused(error_of([&] { read_loop_state(checkpoint); }), path);
    }
}

TEST_CASE("data: a damaged checkpoint is refused by the file's name") {
    Folder folder;
    MemoryModel saved(small_setup(LLAMA), 1), model(small_setup(LLAMA), 2);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
        const std::string path = checkpoint + "/" + name, good = read_bytes(path);
        write_bytes(path, good.substr(0, good.size() / 2));
        check_refused(error_of([&] { load_checkpoint(checkpoint, model); }), path);
        fs::remove(path);
        check_refused(error_of([&] { load_checkpoint(checkpoint, model); }), checkpoint);
        check_refused(error_of([&] { find_checkpoint(folder / "out"); }), folder / "out");
        write_bytes(path, good);
    }
    CHECK(model.writes() == 0);
    load_checkpoint(checkpoint, model);
    CHECK(model.tensors() == saved.tensors());
}

TEST_CASE("data: whatever bytes are changed or cut in a checkpoint, it is read or refused") {
    Folder folder;
    MemoryModel saved(small_setup(GPT2), 1), model(small_setup(GPT2), 2);
    const std::string checkpoint = save_checkpoint(folder / "out", saved, some_state(5));
    Random random(coat::test::run_seed());
    for (const char* name : {"config.json", "trainer.json", "model.safetensors", "optimizer.safetensors"}) {
        CAPTURE(name);
        const std::string path = checkpoint + "/" + name, good = read_bytes(path);
        uint64_t header = good.size();
        if (fs::path(name).extension() == ".safetensors") std::memcpy(&header, good.data(), sizeof header);
        int64_t refused = 0;
        for (int64_t i = 0; i < count(500, 60); i++) {
            write_bytes(path, damaged(good, static_cast<size_t>(header), random));
            const std::string error = error_of([&] {
                read_loop_state(checkpoint);
                load_checkpoint(checkpoint, model);
            });
            if (!error.empty()) refused++;
            REQUIRE((error.empty() || contains(error, checkpoint)));
        }
        CHECK(refused > 0);
        write_bytes(path, good);
    }
    load_checkpoint(checkpoint, model);
    CHECK(model.tensors() == saved.tensors());
}

TEST_CASE("data: older checkpoints but `keep` are removed, later ones and other files stay") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    const std::string out = folder / "out";
    auto names = [&] {
        std::vector<std::string> found;
        for (const auto& entry : fs::directory_iterator(out)) found.push_back(entry.path().filename().string());
        std::sort(found.begin(), found.end());
        return found;
    };
    using Names = std::vector<std::string>;
    for (int64_t step : {10, 20, 30}) save_checkpoint(out, model, some_state(step), 2);
    CHECK(names() == Names{"step-000020", "step-000030"});
    fs::create_directory(out + "/step-notes");
    fs::create_directory(out + "/step-000099.tmp");  // a killed run's
    write_bytes(out + "/log", "mine");
    save_checkpoint(out, model, some_state(25), 1);
    CHECK(names() == Names{"log", "step-000025", "step-000030", "step-notes"});
    CHECK(find_checkpoint(out) == out + "/step-000025");  // the one written last
    MemoryModel changed(small_setup(LLAMA), 7), loaded(small_setup(LLAMA), 8);
    save_checkpoint(out, changed, some_state(25), 1);  // the same step again
    CHECK(names() == Names{"log", "step-000025", "step-000030", "step-notes"});
    load_checkpoint(out + "/step-000025", loaded);
    CHECK(loaded.tensors() == changed.tensors());
    save_checkpoint(out, model, some_state(1234567), 1);
    CHECK(names() == Names{"log", "step-1234567", "step-notes"});
}

TEST_CASE("data: where nothing can be written, it is said and nothing is lost") {
    Folder folder;
    MemoryModel model(small_setup(LLAMA), 1);
    write_bytes(folder / "file", "x");
    check_refused(error_of([&] { save_checkpoint(folder / "file", model, some_state(1)); }), folder / "file", "--out");
    CHECK(read_bytes(folder / "file") == "x");
    check_refused(error_of([&] { find_checkpoint(folder / "none"); }), folder / "none");
    check_refused(error_of([&] { find_checkpoint(folder.path.string()); }), folder.path.string());
}

TEST_CASE("data: a full disk leaves no half-written checkpoint and keeps the one before") {
    Folder folder;
    const std::string out = folder / "out";
    MemoryModel model(small_setup(LLAMA), 1), loaded(small_setup(LLAMA), 2);
    const std::string first = save_checkpoint(out, model, some_state(1));
    const auto bytes = static_cast<rlim_t>(fs::file_size(first + "/optimizer.safetensors"));
    // The largest size of a file stands for the disk; each limit strikes at another place.
    for (rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{5000}, bytes - 1}) {
        rlimit before{};
        getrlimit(RLIMIT_FSIZE, &before);
        const auto handler = std::signal(SIGXFSZ, SIG_IGN);
        const rlimit tight{limit, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &tight);
        const std::string error = error_of([&] { save_checkpoint(out, model, some_state(2)); });
        setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
        check_refused(error, out + "/step-000002.tmp/", "--out");
        CHECK(!fs::exists(out + "/step-000002"));
        CHECK(!fs::exists(out + "/step-000002.tmp"));
        CHECK(find_checkpoint(out) == first);
    }
    load_checkpoint(first, loaded);
    CHECK(loaded.tensors() == model.tensors());
}

// For ever: a model whose bits follow from its step, each step twice, so that replacing is killed as well.
[[noreturn]] static void save_from(int64_t step, const std::string& out, const Setup& setup) {
    for (;; step++) {
        MemoryModel model(setup, static_cast<uint64_t>(step));
        for (int twice = 0; twice < 2; twice++) save_checkpoint(out, model, some_state(step));
    }
}

TEST_CASE("data: a kill at any moment of a save leaves the last good checkpoint") {
    Folder folder;
    const std::string out = folder / "out";
    const Setup setup = small_setup(LLAMA);
    MemoryModel first(setup, 1), loaded(setup, 0);
    save_checkpoint(out, first, some_state(1));
    Random random(coat::test::run_seed());
    int64_t last = 1, torn = 0;  // the newest step seen; kills that struck in the middle of a save
    for (int64_t i = 0; i < count(60, 15); i++) {
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (!child) save_from(last + 1, out, setup);
        usleep(static_cast<useconds_t>(1000 + random.bits() % static_cast<uint64_t>(30000 + 2000 * i)));  // a busy machine is slow
        kill(child, SIGKILL);
        int status = 0;
        waitpid(child, &status, 0);
        REQUIRE(WIFSIGNALED(status));
        for (const auto& entry : fs::directory_iterator(out)) torn += contains(entry.path().string(), ".tmp");
        const std::string found = find_checkpoint(out);
        const LoopState state = read_loop_state(found);
        REQUIRE(state.step >= last);  // what was once there is there, or newer
        last = state.step;
        load_checkpoint(found, loaded);
        REQUIRE(loaded.tensors() == MemoryModel(setup, static_cast<uint64_t>(last)).tensors());
        REQUIRE(state.tokens == some_state(last).tokens);
    }
    CHECK(torn > 0);
    CHECK(last > 1);
    save_checkpoint(out, first, some_state(last + 1));
    const auto left = fs::directory_iterator(out);  // of what the kills left, nothing
    CHECK(std::distance(begin(left), end(left)) == 1);
}

// The moment between two renames is too short for kills to meet it often; a saver that is only stopped can be looked at
// thousands of times, and what is on the disk then is what a kill would leave.
TEST_CASE("data: while the only checkpoint is replaced there is a good one at every moment") {
    Folder folder;
    const std::string out = folder / "out";
    const Setup setup = small_setup(LLAMA);
    MemoryModel model(setup, 1);
    save_checkpoint(out, model, some_state(1));
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child)
        for (;;) save_checkpoint(out, model, some_state(1));
    Random random(coat::test::run_seed());
    int64_t missing = 0, replacing = 0;
    for (int64_t i = 0; i < count(3000, 500); i++) {
        usleep(static_cast<useconds_t>(random.bits() % 500));
        kill(child, SIGSTOP);
        int status = 0;
        waitpid(child, &status, WUNTRACED);
        replacing += fs::exists(out + "/step-000001.old");
        missing += !error_of([&] { find_checkpoint(out); }).empty();
        kill(child, SIGCONT);
    }
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    CHECK(missing == 0);
    CHECK(replacing > 0);
}

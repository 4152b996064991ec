// test_bad_files.cpp - files that are damaged, hostile or very large: each is read or refused in one sentence, soon, and
// without a crash. (make fuzz looks for more of them.)
#include <doctest/doctest.h>

#include <dirent.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "../coat.h"
#include "../data/checkpoint.h"
#include "../data/safetensors.h"
#include "../data/tokens.h"
#include "tiny.h"

// The test's own fsync and readdir take the place of the C library's: one remembers what is synced, one can fail.
static std::set<std::string> synced;
static int readable_entries = INT_MAX;  // of folders, before the first failure

extern "C" int fsync(int file) {
    std::error_code ignored;
    synced.insert(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string());
    return static_cast<int>(syscall(SYS_fsync, file));
}
extern "C" dirent* readdir(DIR* folder) {
    // On 64-bit Linux both structures are the same.
    if (readable_entries-- > 0) return reinterpret_cast<dirent*>(readdir64(folder));
    errno = EIO;
    return nullptr;
}

namespace {

using namespace coat;
using namespace coat::test;
namespace fs = std::filesystem;

struct Folder {  // removed when the test ends
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "coat-bad-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~Folder() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
    std::string write(const std::string& name, const std::string& bytes) const {
        fs::create_directories((path / name).parent_path());
        std::ofstream(path / name, std::ios::binary) << bytes;
        return *this / name;
    }
};

std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

void replace(std::string& text, const std::string& from, const std::string& to) {
    REQUIRE(contains(text, from));
    text.replace(text.find(from), from.size(), to);
}

// No control characters or bidirectional overrides; Latin letters are enough for these tests.
bool is_plain(const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= 32 && c < 127; });
}

// The action ends in one sentence of a reasonable length that names `who`, `what`, and ends as it should.
void check_refused(const std::function<void()>& action, const std::string& who,
                   const std::string& what = "") {
    std::string said;
    try {
        action();
    } catch (const Error& error) {
        said = error.what();
    }
    CAPTURE(said.substr(0, 5000));
    CHECK(contains(said, who));
    CHECK(contains(said, what));
    CHECK(is_plain(said));
    CHECK(said.size() < 2000);
    CHECK((!said.empty() && said.back() == '.'));
}

double seconds_of(const std::function<void()>& action) {
    const auto begin = std::chrono::steady_clock::now();
    action();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Setup small_setup() { return tiny_setup(tiny_config(LLAMA, true), "coat", "coat", 1, 16); }

std::string saved_checkpoint(const std::string& out, const std::string& settings = "{}") {
    const std::unique_ptr<Model> model = make_reference(small_setup());
    LoopState state{4, 3, {1, 7}, 1000, 5.5, {}, settings};
    return save_checkpoint(out, *model, state);
}

struct Ended {
    int code;
    std::string out, error;
};
Ended shell(const Folder& folder, const std::string& command) {
    const char* named = std::getenv("COAT_TRAIN");
    const std::string program = fs::absolute(named ? named : "./train").string(),
                      kept = folder.path.string() + "-printed";
    const std::string whole = "cd '" + folder.path.string() + "' && export OMP_NUM_THREADS=1 && train() { '" +
                              program + "' --device cpu \"$@\"; } && { " + command + "\n} >'" + kept +
                              ".out' 2>'" + kept + ".err'";
    const int status = std::system(whole.c_str());
    Ended ended{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_bytes(kept + ".out"),
                read_bytes(kept + ".err")};
    fs::remove(kept + ".out");
    fs::remove(kept + ".err");
    return ended;
}
const std::string TINY = "train --data text --batch 2 --seq 16 --sample-every 0 --steps 2 ";

void check_refused(const Ended& ended, const std::string& who, const std::string& what = "") {
    CHECK(ended.code == 1);
    check_refused([&] { throw Error(ended.error.substr(0, ended.error.size() - 1)); }, who, what);
}

std::string deep(int depth) {
    return std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']');
}

std::string text_of_lines() {
    std::string text;
    for (int i = 0; i < 1500; i++)
        text += "int f" + std::to_string(i) + "(int x) { return x * " + std::to_string(i * i % 97) + "; }\n";
    return text;
}

std::string vocabulary(const nlohmann::json& pieces) {
    return nlohmann::json{
        {"format", "coat vocabulary"}, {"version", 1}, {"size", pieces.size()}, {"pieces", pieces}}
        .dump();
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Every JSON file

TEST_CASE("bad files: JSON that is nested a million deep is refused by the file's name") {
    Folder folder;
    const std::string nested = deep(1'000'000);
    const std::string checkpoint = saved_checkpoint(folder / "out");
    auto spoil = [&](const std::string& path, const std::string& from, const std::string& to) {
        std::string text = read_bytes(path);
        replace(text, from, to);
        std::ofstream(path, std::ios::binary) << text;
    };
    spoil(checkpoint + "/config.json", "\"hidden_act\": \"silu\"", "\"hidden_act\": " + nested);
    check_refused([&] { read_model_config(checkpoint); }, "config.json", "nested");
    spoil(checkpoint + "/trainer.json", "\"version\": 1", "\"version\": " + nested);
    check_refused([&] { read_loop_state(checkpoint); }, "trainer.json", "nested");
    folder.write("shards/model.safetensors.index.json", "{\"weight_map\": {\"a\": " + nested + "}}");
    check_refused([&] { load_weights(folder / "shards", *make_reference(small_setup())); }, "index.json",
                  "nested");
    check_refused([&] { Vocabulary::read(folder.write("v.json", "{\"format\": " + nested + "}")); },
                  "v.json");
    const std::string header = "{\"a\":" + nested + "}";
    const uint64_t length = header.size();
    const std::string file =
        folder.write("a.safetensors", std::string(reinterpret_cast<const char*>(&length), 8) + header);
    check_refused([&] { Safetensors s(file); }, file, "nested");
    const std::string other =
        saved_checkpoint(folder / "settings", "{\"recipe\": " + nested + ", \"train_tokens\": 1}");
    check_refused(shell(folder, "train --resume settings --steps 9"), "settings");
}

TEST_CASE("bad files: a JSON text in quotes may hold any brackets; a name that is there twice is refused") {
    Folder folder;
    const std::string brackets(1000, '{');
    const Vocabulary v = Vocabulary::read(folder.write("v.json", vocabulary({brackets, "\"[\\", ":,"})));
    CHECK(v.decode({0, 1, 2}) == brackets + "\"[\\:,");
    check_refused(
        [&] { Vocabulary::read(folder.write("v.json", "{\"size\": 1, " + vocabulary({"a"}).substr(1))); },
        "v.json");
    const std::string config = saved_checkpoint(folder / "out") + "/config.json";
    std::string text = read_bytes(config);
    replace(text, "{", "{\"hidden_size\": 1024, ");
    std::ofstream(config, std::ios::binary) << text;
    check_refused([&] { read_model_config(fs::path(config).parent_path().string()); }, config, "twice");
}

TEST_CASE("bad files: counts in trainer.json that would overflow are refused") {
    Folder folder;
    const std::string checkpoint = saved_checkpoint(folder / "out"), path = checkpoint + "/trainer.json",
                      good = read_bytes(path);
    for (const char* field : {"step", "updates", "epoch", "tokens"}) {
        nlohmann::ordered_json state = nlohmann::ordered_json::parse(good);
        state[field] = INT64_MAX;
        if (field == std::string("updates")) state["step"] = INT64_MAX;
        std::ofstream(path, std::ios::binary) << state.dump();
        check_refused([&] { read_loop_state(checkpoint); }, path);
    }
    for (const char* tokens : {"1e300", "-1", "\"7\""}) {
        saved_checkpoint(folder / "out", "{\"train_tokens\": " + std::string(tokens) + "}");
        check_refused(shell(folder, "train --resume out --steps 9"), "trainer.json");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Large files, and those that say that they are

TEST_CASE(
    "bad files: 80,000 tensors are written and read in seconds, and more than 100,000 are refused as such") {
    Folder folder;
    auto write = [&](const std::string& name, int64_t tensors) {
        std::vector<TensorInfo> table;
        for (int64_t i = 0; i < tensors; i++) table.push_back({{"tensor." + std::to_string(i)}, "U8", {0}});
        SafetensorsWriter(folder / name, table, {}).finish();
    };
    const double took = seconds_of([&] {
        write("many", 80'000);
        CHECK(Safetensors(folder / "many").tensors().size() == 80'000);
    });
    CHECK(took < 20);  // a second; quadratic in the number of tensors it took 44
    write("too-many", 100'001);
    check_refused([&] { Safetensors file(folder / "too-many"); }, "too-many", "100001 tensors");
}

TEST_CASE("bad files: a header of numbers without end is refused before it takes memory") {
    Folder folder;
    std::string header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[0";
    for (int i = 0; i < 2'000'000; i++) header += ",0";
    const uint64_t length = (header += "],\"data_offsets\":[0,0]}}").size();
    const std::string file =
        folder.write("endless", std::string(reinterpret_cast<const char*>(&length), 8) + header);
    check_refused([&] { Safetensors s(file); }, file, "values");
}

TEST_CASE("bad files: a binary of a terabyte in a data folder is passed over") {
    Folder folder;
    folder.write("data/text", "some text to train on");
    folder.write("data/binary", std::string(16, '\0'));
    std::error_code unsupported;
    fs::resize_file(folder / "data/binary", uint64_t{1} << 40, unsupported);  // there is nothing in it
    if (unsupported) fs::resize_file(folder / "data/binary", uint64_t{1} << 36);
    const Corpus corpus = load_corpus(folder / "data");
    CHECK(corpus.train.size() + corpus.validation.size() == 21);
}

TEST_CASE("bad files: a config.json that is not true of the weights is refused before memory is asked for") {
    Folder folder;
    folder.write("text", text_of_lines());
    const std::string checkpoint = saved_checkpoint(folder / "out"), path = checkpoint + "/config.json";
    std::string config = read_bytes(path);
    replace(config, "\"intermediate_size\": 176", "\"intermediate_size\": 1048576");
    replace(config, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4096");
    replace(config, "\"vocab_size\": 50", "\"vocab_size\": 256");
    std::ofstream(path, std::ios::binary) << config;  // 52 TB
    check_refused(shell(folder, TINY + "--out '' --model " + checkpoint), "model.safetensors");
    check_refused([&] { check_weights(checkpoint, read_model_config(checkpoint)); }, "model.safetensors");
}

TEST_CASE("bad files: a long prompt is encoded in no time") {
    std::vector<std::string> pieces;  // as many as GPT-2 has, and every byte among them
    for (int c = 0; c < 256; c++) pieces.push_back({static_cast<char>(c < 128 ? c : 0xC2 + (c >= 192))});
    for (int c = 128; c < 256; c++) pieces[static_cast<size_t>(c)] += static_cast<char>(c & 0xBF);
    for (int i = 0; i < 50'000; i++) pieces.push_back(" word" + std::to_string(i));
    Folder folder;
    const Vocabulary v = Vocabulary::read(folder.write("v.json", vocabulary(pieces)));
    std::string prompt;
    for (int i = 0; i < 20'000; i++) prompt += " word" + std::to_string(i);
    CHECK(seconds_of([&] {
              const std::vector<int32_t> tokens = v.encode(prompt);
              CHECK(tokens.size() == 20'000);
              CHECK(v.decode(tokens) == prompt);
          }) < 2);
}

TEST_CASE("bad files: a longest match is found among pieces of all bytes, as by looking at each") {
    Folder folder;
    Random random(run_seed());
    for (int round = 0; round < 200; round++) {
        std::vector<std::string> pieces = {"a", "b", "c"};
        for (int64_t n = random.below(30); n > 0; n--) {
            pieces.emplace_back();
            for (int64_t length = random.below(5); length > 0; length--)
                pieces.back() += static_cast<char>('a' + random.below(3));
        }
        std::string text;
        for (int i = 0; i < 50; i++) text += static_cast<char>('a' + random.below(3));
        std::vector<int32_t> expected;
        for (size_t at = 0; at < text.size(); at += pieces[static_cast<size_t>(expected.back())].size()) {
            size_t best = 0;
            for (size_t t = 0; t < pieces.size(); t++)
                if (text.compare(at, pieces[t].size(), pieces[t]) == 0 &&
                    (pieces[t].size() >= pieces[best].size() || text[at] != pieces[best][0]))
                    best = t;
            expected.push_back(static_cast<int32_t>(best));
        }
        // of equal pieces the last, and no piece that is empty
        REQUIRE(Vocabulary::read(folder.write("v.json", vocabulary(pieces))).encode(text) == expected);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is said of them

TEST_CASE("bad files: whatever a file or a path says, the message is plain, short and whole") {
    Folder folder;
    auto type_is = [&](const std::string& type) {
        const nlohmann::json config = {{"model_type", type}};
        folder.write("model/config.json", config.dump());
        check_refused([&] { read_model_config(folder / "model"); }, "config.json",
                      "implements llama and gpt2");
    };
    type_is(std::string("a\0b", 3));
    type_is("\u009B31m");                    // a control sequence in one character
    type_is("\u202Eabc\u2066\u200F\u2028");  // changes of direction, and a line break that is not \n
    type_is(std::string(1'000'000, 'x'));
    folder.write("model/config.json",
                 "{\"model_type\": \"llama\", \"hidden_act\": \"" + std::string(1'000'000, 'y') + "\"}");
    check_refused([&] { read_model_config(folder / "model"); }, "config.json", "start from another model");
    check_refused([&] { read_model_config(folder / "caf\xE9\xFF\x80\xED\xA0\x80\u202E"); },
                  "give a Hugging Face model folder");
    CHECK(std::string(Error("caf\u00E9 \u4E2D\u6587").what()) ==
          "caf\u00E9 \u4E2D\u6587");  // what is no danger stays

    const std::string header =
        "{\"" + std::string(1'000'000, 'z') + "\":{\"dtype\":\"F31\",\"shape\":[],\"data_offsets\":[0,0]}}";
    const uint64_t length = header.size();
    const std::string file =
        folder.write("name", std::string(reinterpret_cast<const char*>(&length), 8) + header);
    check_refused([&] { Safetensors s(file); }, file, "download it again");
}

TEST_CASE("bad files: paths in what a run prints are plain") {
    Folder folder;
    folder.write("te\u202Ext", text_of_lines());
    std::string run = TINY;
    replace(run, "text", "te\u202Ext");
    const Ended first = shell(folder, run + "--out 'o\u202Eut'");
    CHECK(first.code == 0);
    CHECK(!contains(first.out, "\u202E"));
    CHECK(contains(first.out, "saved | step 2 | o?ut/step-000002"));
    const Ended second = shell(folder, "train --resume 'o\u202Eut' --steps 3");
    CHECK(second.code == 0);
    CHECK(!contains(second.out, "\u202E"));
}

TEST_CASE("bad files: a folder that cannot be read is named") {
    Folder folder;
    for (int i = 0; i < 6; i++) folder.write(std::to_string(i), "");
    readable_entries = 5;
    std::string said;
    try {
        find_checkpoint(folder.path.string());
    } catch (const Error& error) {
        said = error.what();
    }
    readable_entries = INT_MAX;
    CHECK(contains(said, folder.path.string()));
    CHECK(contains(said, "Input/output error"));
}

TEST_CASE("bad files: a link to itself in a data folder is passed over") {
    Folder folder;
    folder.write("data/text", "some text to train on");
    fs::create_symlink("loop", folder / "data/loop");
    fs::create_symlink(".loop", folder / "data/.loop");
    CHECK(load_corpus(folder / "data").train.size() > 0);
}

TEST_CASE("bad files: what a checkpoint could not remember is refused at the start") {
    Folder folder;
    folder.write("caf\xE9", text_of_lines());
    folder.write("caf\u00E9", text_of_lines());
    std::string run = TINY;
    replace(run, "text", "caf\xE9");
    check_refused(shell(folder, run), "--data", "UTF-8");
    CHECK(!fs::exists(folder / "out"));
    replace(run, "caf\xE9", "caf\u00E9");
    CHECK(shell(folder, run).code == 0);
    CHECK(shell(folder, "train --resume out --steps 3").code == 0);
}

TEST_CASE("bad files: settings that are damaged in a checkpoint are told to be the checkpoint's") {
    Folder folder;
    folder.write("text", text_of_lines());
    REQUIRE(shell(folder, TINY).code == 0);
    const std::string path = folder / "out/step-000002/trainer.json", good = read_bytes(path);
    for (const auto& [from, to] : {std::pair{"\\\"recipe\\\":\\\"coat\\\"", "\\\"recipe\\\":\\\"goat\\\""},
                                   {"\\\"lr\\\":\\\"3e-3\\\"", "\\\"lr\\\":\\\"3e9\\\""},
                                   {"\\\"master\\\":\\\"exact\\\"", "\\\"master\\\":\\\"some\\\""},
                                   {"\\\"schedule\\\":\\\"cosine\\\"", "\\\"schedule\\\":\\\"\\\""}}) {
        std::string bad = good;
        replace(bad, from, to);
        std::ofstream(path, std::ios::binary) << bad;
        check_refused(shell(folder, "train --resume out --steps 3"), "trainer.json");
    }
    std::ofstream(path, std::ios::binary) << good;
    check_refused(shell(folder, "train --resume out --steps 3 --recompute maybe"),
                  "--recompute maybe");  // this one is the user's
    CHECK(!contains(shell(folder, "train --resume out --steps 3 --recompute maybe").error, "trainer.json"));
}

TEST_CASE("bad files: with stdout closed the log holds the log alone") {
    Folder folder;
    folder.write("text", text_of_lines());
    CHECK(shell(folder, TINY + "--out '' --log log >&-").code == 0);
    std::ifstream log(folder / "log");
    int lines = 0;
    for (std::string line; std::getline(log, line); lines++) CHECK(nlohmann::json::accept(line));
    CHECK(lines > 3);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints on the disk

TEST_CASE(
    "bad files: a changed bit anywhere in a checkpoint's tensors is found before the model is touched") {
    Folder folder;
    const std::string checkpoint = saved_checkpoint(folder / "out");
    const std::unique_ptr<Model> model = make_reference(small_setup());
    load_checkpoint(checkpoint, *model);
    auto weights = [&] {
        std::map<std::string, std::string> all;
        for (const StateTensor& t : weight_tensors(model->setup().config)) {
            all[t.name].resize(static_cast<size_t>(t.total_bytes()));
            model->read(t.name, all[t.name].data());
        }
        return all;
    };
    const auto before = weights();
    Random random(run_seed());
    for (const char* name : {"/model.safetensors", "/optimizer.safetensors"}) {
        const std::string path = checkpoint + name;
        std::string bytes = read_bytes(path);
        uint64_t header;
        std::memcpy(&header, bytes.data(), 8);
        const int64_t begin = static_cast<int64_t>(header) + 8,
                      body = static_cast<int64_t>(bytes.size()) - begin;
        for (int64_t i = 0; i < count(40, 20); i++) {
            const int64_t at = i == 0 ? begin : i == 1 ? begin + body - 1 : begin + random.below(body);
            bytes[static_cast<size_t>(at)] ^= 1;
            std::ofstream(path, std::ios::binary) << bytes;
            check_refused([&] { load_checkpoint(checkpoint, *model); }, path);
            bytes[static_cast<size_t>(at)] ^= 1;
        }
        std::ofstream(path, std::ios::binary) << bytes;
    }
    CHECK(weights() == before);
    load_checkpoint(checkpoint, *model);
}

TEST_CASE("bad files: the folder of a new --out is on the disk before its checkpoint is") {
    Folder folder;
    synced.clear();
    saved_checkpoint(folder / "new/and/newer");
    for (const char* path : {"", "new", "new/and", "new/and/newer"}) {
        CAPTURE(path);
        CHECK(synced.count((fs::canonical(folder.path) / path).lexically_normal().string()) +
                  synced.count(fs::canonical(folder.path / path).string()) >
              0);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// data/tokenize.py, with a stand-in for the package tokenizers

TEST_CASE("bad files: a tokenizer without tokens, or with others than bytes, is refused in one sentence" *
          doctest::skip(std::system("python3 --version >/dev/null 2>&1") != 0)) {
    Folder folder;
    folder.write("text", "some text");
    folder.write("tokenizers.py", R"(
import json
class Tokenizer:
    @staticmethod
    def from_file(name):
        self = Tokenizer()
        self.tokens = json.load(open(name))
        return self
    def to_str(self): return json.dumps({"decoder": {"type": "ByteLevel"}})
    def get_vocab(self, with_added_tokens): return {t: i for i, t in enumerate(self.tokens)}
    def get_added_tokens_decoder(self): return {}
    def id_to_token(self, t): return self.tokens[t]
)");
    for (const auto& [tokens, named] : {std::pair{"[]", "no tokens"}, {"[\"a\", \"\\u4e2d\"]", "alphabet"}}) {
        folder.write("t.json", tokens);
        const Ended ended =
            shell(folder, "PYTHONPATH=. python3 '" + fs::absolute("data/tokenize.py").string() +
                              "' --tokenizer t.json text");
        check_refused(ended, named);
        CHECK(!contains(ended.error, "Traceback"));
    }
}

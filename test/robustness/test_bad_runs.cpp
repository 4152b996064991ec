// test_bad_runs.cpp - folders, paths, tokenizers and output streams that a run of ./train cannot use. Each
// gives one sentence, and no crash.
#include <doctest/doctest.h>

#include <dirent.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <cerrno>
#include <climits>
#include <set>

#include "../bad_files.h"
#include "../model_files.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::bad_files;

namespace {

// The fsync, readdir, fstat and rename defined here replace those of the C library. fsync records which paths
// are synced; the others can be made to fail.
std::set<std::string> synced;
int readable_entries = INT_MAX;  // entries of folders before the first failure
bool fstat_fails = false;
std::string busy;  // a path that cannot be renamed

}  // namespace

extern "C" int fsync(int file) {
    std::error_code ignored;
    synced.insert(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file), ignored).string());
    return static_cast<int>(syscall(SYS_fsync, file));
}
extern "C" dirent* readdir(DIR* folder) {
    // On 64-bit Linux dirent and dirent64 are the same structure.
    if (readable_entries-- > 0) return reinterpret_cast<dirent*>(readdir64(folder));
    errno = EIO;
    return nullptr;
}
extern "C" int fstat(int file, struct stat* status) {
    if (!fstat_fails) return static_cast<int>(syscall(SYS_fstat, file, status));
    errno = EIO;
    return -1;
}

extern "C" int rename(const char* from, const char* to) noexcept {
    if (from != busy) return static_cast<int>(syscall(SYS_rename, from, to));
    errno = EBUSY;
    return -1;
}

TEST_CASE("vocabulary: a long prompt is encoded quickly") {
    std::vector<std::string> pieces;  // as many as GPT-2 has, with every byte
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

TEST_CASE("vocabulary: the longest match equals that of a search over all pieces") {
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
        // Of equal pieces the last one counts; an empty piece never does.
        REQUIRE(Vocabulary::read(folder.write("v.json", vocabulary(pieces))).encode(text) == expected);
    }
}

TEST_CASE("error messages: plain, short and complete for any file content or path") {
    Folder folder;
    auto type_is = [&](const std::string& type) {
        const nlohmann::json config = {{"model_type", type}};
        folder.write("model/config.json", config.dump());
        check_error([&] { read_model_config(folder / "model"); }, "config.json",
                    "does not implement (only llama, mistral, qwen2, gpt2)");
    };
    type_is(std::string("a\0b", 3));
    type_is("\u009B31m");                    // a control sequence introducer in one character
    type_is("\u202Eabc\u2066\u200F\u2028");  // changes of text direction, and a line break other than \n
    type_is(std::string(1'000'000, 'x'));
    const std::string long_name(1'000'000, 'y');
    folder.write("model/config.json", "{\"model_type\": \"llama\", \"hidden_act\": \"" + long_name + "\"}");
    check_error([&] { read_model_config(folder / "model"); }, "config.json", "give another model");
    check_error([&] { read_model_config(folder / "caf\xE9\xFF\x80\xED\xA0\x80\u202E"); },
                "give a Hugging Face model folder");
    // Harmless characters do not change.
    CHECK(std::string(Error("caf\u00E9 \u4E2D\u6587").what()) == "caf\u00E9 \u4E2D\u6587");

    const std::string header =
        "{\"" + std::string(1'000'000, 'z') + "\":{\"dtype\":\"F31\",\"shape\":[],\"data_offsets\":[0,0]}}";
    const std::string file = folder.write("name", only_header(header));
    check_error([&] { Safetensors s(file); }, file, "download it again");
}

TEST_CASE("find_checkpoint, load_corpus: a folder that cannot be read is rejected by name") {
    Folder folder;
    for (int i = 0; i < 6; i++) folder.write(std::to_string(i), "text");
    const std::string path = folder.path.string();
    const std::function<void()> readers[] = {[&] { find_checkpoint(path); }, [&] { load_corpus(path); }};
    for (const auto& read : readers) {
        readable_entries = 5;
        const std::string error = error_of(read);
        readable_entries = INT_MAX;
        CHECK(contains(error, path));
        CHECK(contains(error, "Input/output error"));
    }
}

TEST_CASE("save_checkpoint: an older checkpoint that cannot be removed does not end the run") {
    Folder folder;
    model_files::MemoryModel model(small_setup(), 1);
    using model_files::some_state;
    const std::string out = folder / "out", name = "0123456789abcdef";
    busy = save_checkpoint(out, model, some_state(10, name, 2.0));
    const std::string second = save_checkpoint(out, model, some_state(20, name, 1.0));
    CHECK(fs::exists(busy + "/trainer.json"));
    busy.clear();
    CHECK(find_checkpoint(out) == second);
    const std::string third = save_checkpoint(out, model, some_state(30, name, 0.5));
    CHECK(!fs::exists(out + "/step-000010"));
    CHECK(find_checkpoint(out) == third);
}

TEST_CASE("InputFile: a file whose size cannot be read is an error, and is closed") {
    Folder folder;
    const std::string path = folder.write("a", "text");
    auto open_files = [] {
        return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
    };
    const auto before = open_files();
    fstat_fails = true;
    const std::string error = error_of([&] { const InputFile file(path); });
    fstat_fails = false;
    CHECK(contains(error, path));
    CHECK(contains(error, "Input/output error"));
    CHECK(open_files() == before);
}

TEST_CASE("load_corpus: a link to itself in a folder is ignored") {
    Folder folder;
    folder.write("data/text", "some text to train on");
    fs::create_symlink("loop", folder / "data/loop");
    fs::create_symlink(".loop", folder / "data/.loop");
    CHECK(load_corpus(folder / "data").train.size() > 0);
}

TEST_CASE("train: a new --out folder is synced to disk before its checkpoint") {
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

TEST_CASE("tokenize.py: a tokenizer without tokens or without byte tokens is rejected in one sentence" *
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
        const std::string tokenize = fs::absolute("data/tokenize.py").string();
        const Ended ended = shell(folder, "PYTHONPATH=. python3 '" + tokenize + "' --tokenizer t.json text");
        check_failed(ended, named);
        CHECK(!contains(ended.error, "Traceback"));
    }
}

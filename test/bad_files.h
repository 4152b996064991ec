// bad_files.h - temporary folders and bad files, shared by the tests of robustness.
#pragma once
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
#include <nlohmann/json.hpp>

#include "../coat.h"
#include "../data/checkpoint.h"
#include "../data/safetensors.h"
#include "../data/tokens.h"
#include "tiny.h"

namespace coat::test::bad_files {

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

inline std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

inline void replace(std::string& text, const std::string& from, const std::string& to) {
    REQUIRE(contains(text, from));
    text.replace(text.find(from), from.size(), to);
}

// No control characters or bidirectional overrides; Latin letters are enough for these tests.
inline bool is_plain(const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= 32 && c < 127; });
}

// The action ends in one sentence of a reasonable length that names `who`, `what`, and ends as it should.
inline void check_refused(const std::function<void()>& action, const std::string& who,
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

inline double seconds_of(const std::function<void()>& action) {
    const auto begin = std::chrono::steady_clock::now();
    action();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline Setup small_setup() { return tiny_setup(tiny_config(LLAMA, true), "coat", "coat", 1, 16); }

inline std::string saved_checkpoint(const std::string& out, const std::string& settings = "{}") {
    const std::unique_ptr<Model> model = make_reference(small_setup());
    LoopState state{4, 3, {1, 7}, 1000, 5.5, {}, settings};
    return save_checkpoint(out, *model, state);
}

struct Ended {
    int code;
    std::string out, error;
};
inline Ended shell(const Folder& folder, const std::string& command) {
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
inline const std::string TINY = "train --data text --batch 2 --seq 16 --sample-every 0 --steps 2 ";

inline void check_refused(const Ended& ended, const std::string& who, const std::string& what = "") {
    CHECK(ended.code == 1);
    check_refused([&] { throw Error(ended.error.substr(0, ended.error.size() - 1)); }, who, what);
}

inline std::string text_of_lines() {
    std::string text;
    for (int i = 0; i < 1500; i++)
        text += "int f" + std::to_string(i) + "(int x) { return x * " + std::to_string(i * i % 97) + "; }\n";
    return text;
}

inline std::string vocabulary(const nlohmann::json& pieces) {
    return nlohmann::json{
        {"format", "coat vocabulary"}, {"version", 1}, {"size", pieces.size()}, {"pieces", pieces}}
        .dump();
}

}  // namespace coat::test::bad_files

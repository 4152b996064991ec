// program.h - runs ./train in a folder of its own, and checks what it prints, writes and returns.
#pragma once
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>
#include <sys/wait.h>

#include "files.h"

namespace coat::test {

inline std::string text_of_lines() {  // large enough for the tiny runs below
    std::string text;
    for (int i = 0; i < 1500; i++)
        text += "int f" + std::to_string(i) + "(int x) { return x * " + std::to_string(i * i % 97) + "; }\n";
    return text;
}

// A folder with the file "text" to train on.
struct RunFolder : Folder {
    RunFolder() { write("text", text_of_lines()); }
};

struct Ended {
    int code;
    std::string out, error;
};

inline std::string program() {
    const char* path = std::getenv("COAT_TRAIN");
    return fs::absolute(path ? path : "./train").string();
}

// Runs a shell command in the folder. Its output is captured in files outside the folder. One thread: these
// runs are too small for more.
inline Ended shell(const Folder& folder, const std::string& command) {
    const std::string printed = folder.path.string() + "-printed";
    const std::string whole = "cd '" + folder.path.string() + "' && export OMP_NUM_THREADS=1 && { " +
                              command + "\n} >'" + printed + ".out' 2>'" + printed + ".err'";
    // The child has the default signal handlers, also if the tests run under nohup.
    using Handler = void (*)(int);
    const Handler hangup = std::signal(SIGHUP, SIG_DFL), pipe = std::signal(SIGPIPE, SIG_DFL);
    const int status = std::system(whole.c_str());
    std::signal(SIGHUP, hangup);
    std::signal(SIGPIPE, pipe);
    Ended ended{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(printed + ".out"),
                read_file(printed + ".err")};
    fs::remove(printed + ".out");
    fs::remove(printed + ".err");
    return ended;
}

// Flags of a run that takes a fraction of a second. A test must not repeat these flags: a flag given twice is
// an error.
inline const std::string TINY = " --device cpu --data text --batch 2 --seq 16 --sample-every 0 ";
inline Ended train(const Folder& folder, const std::string& flags) {
    return shell(folder, "'" + program() + "' " + flags);
}
inline Ended tiny(const Folder& folder, const std::string& flags) { return train(folder, TINY + flags); }

inline void require_success(const Ended& ended) {
    INFO(ended.error);
    REQUIRE(ended.code == 0);
}

// A program that failed with exit code 1 and one line on stderr.
inline void check_failed(const Ended& ended, const std::string& who, const std::string& what = "") {
    CAPTURE(ended.error);
    CHECK(ended.code == 1);
    REQUIRE(ended.error.size() > 2);
    CHECK(ended.error.back() == '\n');
    check_error(ended.error.substr(0, ended.error.size() - 1), who, what);
}

// As above, of ./train, in one sentence.
inline void check_one_sentence(const Ended& ended, const std::string& who) {
    check_failed(ended, who);
    CHECK(ended.error.compare(0, 7, "train: ") == 0);
    CHECK(!contains(ended.error, ". "));
}

// The flags are rejected in one sentence, and no file is lost, changed or left half-written.
inline void check_rejected(const Folder& folder, const std::string& flags, const std::string& who) {
    CAPTURE(flags);
    const auto before = folder.files();
    check_one_sentence(train(folder, flags), who);
    CHECK(folder.files() == before);
}

// The lines of one kind in the file "log" of the folder.
inline std::vector<nlohmann::json> logged(const Folder& folder, const std::string& kind) {
    std::vector<nlohmann::json> lines;
    std::istringstream log(read_file(folder.path / "log"));
    for (std::string line; std::getline(log, line);)
        if (auto parsed = nlohmann::json::parse(line); parsed.at("kind") == kind) lines.push_back(parsed);
    return lines;
}

inline double number_after(const std::string& text, const std::string& words) {
    const size_t at = text.find(words);
    REQUIRE_MESSAGE(at != std::string::npos, "\"" << words << "\" is not in the output");
    return std::strtod(text.c_str() + at + words.size(), nullptr);
}

// Everything in a checkpoint that two equal runs have in common: all but the random name of the run.
inline std::string weights_and_state(const fs::path& checkpoint) {
    for (const char* file : {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"})
        REQUIRE(fs::exists(checkpoint / file));
    std::string trainer = read_file(checkpoint / "trainer.json");
    const size_t run = trainer.find("\"run\": \"");
    REQUIRE(run != std::string::npos);
    trainer.erase(run, trainer.find(',', run) - run);
    return read_file(checkpoint / "model.safetensors") + read_file(checkpoint / "optimizer.safetensors") +
           trainer;
}

}  // namespace coat::test

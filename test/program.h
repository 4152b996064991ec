// program.h - runs ./train in a folder of its own, and looks at what it prints, leaves behind and exits with.
#pragma once
#include <doctest/doctest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>
#include <sys/wait.h>
#include <unistd.h>

namespace coat::test {

namespace fs = std::filesystem;

inline std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

// An empty folder with a text in it that is large enough for the tiny runs here; it goes when the test ends.
struct Folder {
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "coat-test-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()) != nullptr);
        path = name;
        std::string text;
        for (int i = 0; i < 1500; i++)
            text +=
                "int f" + std::to_string(i) + "(int x) { return x * " + std::to_string(i * i % 97) + "; }\n";
        write_file(path / "text", text);
    }
    ~Folder() { fs::remove_all(path); }
    Folder(const Folder&) = delete;

    std::map<std::string, std::string> files() const {  // every file's bytes
        std::map<std::string, std::string> all;
        for (const auto& entry : fs::recursive_directory_iterator(path))
            if (entry.is_regular_file())
                all[fs::relative(entry.path(), path).string()] = read_file(entry.path());
        return all;
    }
};

struct Ended {
    int code;
    std::string out, error;
};

inline std::string program() {
    const char* named = std::getenv("COAT_TRAIN");
    return fs::absolute(named ? named : "./train").string();
}

// A shell command in the folder; what it prints is kept outside it. One thread: these runs are too small to
// share.
inline Ended shell(const Folder& folder, const std::string& command) {
    const std::string kept = folder.path.string() + "-printed";
    const std::string whole = "cd '" + folder.path.string() + "' && export OMP_NUM_THREADS=1 && { " +
                              command + "\n} >'" + kept + ".out' 2>'" + kept + ".err'";
    using Handler = void (*)(int);  // the child has the usual signals, also where the tests run under nohup
    const Handler hangup = std::signal(SIGHUP, SIG_DFL), pipe = std::signal(SIGPIPE, SIG_DFL);
    const int status = std::system(whole.c_str());
    std::signal(SIGHUP, hangup);
    std::signal(SIGPIPE, pipe);
    Ended ended{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(kept + ".out"),
                read_file(kept + ".err")};
    fs::remove(kept + ".out");
    fs::remove(kept + ".err");
    return ended;
}

// A run that takes a fraction of a second; flags may be given again by the test only if they are not these.
inline constexpr const char* TINY = " --device cpu --data text --batch 2 --seq 16 --sample-every 0 ";
inline Ended train(const Folder& folder, const std::string& flags) {
    return shell(folder, "'" + program() + "' " + flags);
}
inline Ended tiny(const Folder& folder, const std::string& flags) { return train(folder, TINY + flags); }

inline void require_success(const Ended& ended) {
    INFO(ended.error);
    REQUIRE(ended.code == 0);
}

inline void check_one_sentence(const Ended& ended, const std::string& names) {
    CAPTURE(ended.error);
    CHECK(ended.code == 1);
    CHECK(ended.error.find(names) != std::string::npos);
    CHECK(ended.error.compare(0, 7, "train: ") == 0);
    REQUIRE(ended.error.size() > 2);
    CHECK(ended.error.find('\n') == ended.error.size() - 1);  // one line
    CHECK(ended.error.find(". ") == std::string::npos);        // one sentence
    CHECK(ended.error[ended.error.size() - 2] == '.');
}

inline void check_refused(const Folder& folder, const std::string& flags, const std::string& names) {
    CAPTURE(flags);
    const auto before = folder.files();
    check_one_sentence(train(folder, flags), names);
    CHECK(folder.files() == before);  // nothing lost, nothing half-written
}

inline std::string token_file(uint32_t magic, uint32_t count, const std::vector<uint16_t>& tokens) {
    uint32_t header[256] = {magic, 1, count};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
}

inline double number_after(const std::string& text, const std::string& words) {
    const size_t at = text.find(words);
    REQUIRE_MESSAGE(at != std::string::npos, "\"" << words << "\" is not in the output");
    return std::strtod(text.c_str() + at + words.size(), nullptr);
}

inline std::string weights_and_state(const fs::path& checkpoint) {
    for (const char* file : {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"})
        REQUIRE(fs::exists(checkpoint / file));
    std::string trainer = read_file(checkpoint / "trainer.json");
    const size_t run =
        trainer.find("\"run\": \"");  // a random name, the only thing that two equal runs differ in
    REQUIRE(run != std::string::npos);
    trainer.erase(run, trainer.find(',', run) - run);
    return read_file(checkpoint / "model.safetensors") + read_file(checkpoint / "optimizer.safetensors") +
           trainer;
}

}  // namespace coat::test

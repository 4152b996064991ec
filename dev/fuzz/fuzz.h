// dev/fuzz/fuzz.h - what the fuzzers share. Each is a libFuzzer target: make fuzz builds and runs them with
// clang.
//
// A reader may accept an input or throw Error with a message that is fit to print; all else is a defect.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#include "../../model.h"

namespace coat::fuzz {

// A file in memory with a name. Readers map files, so that the input must be one.
class InputFile {
public:
    explicit InputFile(const std::string& name) : file_(memfd_create("input", 0)) {
        static const std::string folder = new_folder();
        path = folder + "/" + name;
        std::filesystem::create_symlink("/proc/self/fd/" + std::to_string(file_), path);
    }
    void write(const uint8_t* data, size_t size) const {
        if (file_ < 0 || ftruncate(file_, 0) || pwrite(file_, data, size, 0) != static_cast<ssize_t>(size))
            std::abort();
    }
    std::string folder() const { return std::filesystem::path(path).parent_path().string(); }
    std::string path;

private:
    static std::string new_folder() {
        std::string folder = (std::filesystem::temp_directory_path() / "coat-fuzz-XXXXXX").string();
        if (!mkdtemp(folder.data())) std::abort();
        static const std::string kept = folder;
        std::atexit([] { std::filesystem::remove_all(kept); });
        return folder;
    }
    int file_;
};

template <class Read> void check_reader(const Read& read) {
    try {
        read();
    } catch (const Error& error) {
        const std::string said = error.what();
        if (said.empty() || said.back() != '.' || said.size() > 2000 || printable(said) != said) {
            std::fprintf(stderr, "not a message for the user: %s\n", said.c_str());
            std::abort();
        }
    }
}

}  // namespace coat::fuzz

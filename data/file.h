// data/file.h - files and folders of the operating system: read, written, and synced to disk.
//
// All of data/ uses these classes, so that a failed read or write is always an Error that names the path, and
// a half-written file never stays behind.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../error.h"

namespace coat {

inline bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

inline std::string path_in(const std::string& folder, const std::string& file) {
    return (std::filesystem::path(folder) / file).string();
}

// Whether the path has an entry in its folder: also if that is a link that leads nowhere.
inline bool has_entry(const std::string& path) {
    std::error_code unknown;
    return std::filesystem::exists(std::filesystem::symlink_status(path, unknown));
}

// The number of an open file or folder; negative if it cannot be opened. As a member it is closed also where
// the constructor of its owner fails.
class Descriptor {
public:
    Descriptor(const std::string& path, int flags) : file_(::open(path.c_str(), flags | O_CLOEXEC)) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (file_ >= 0) ::close(file_);
    }
    operator int() const { return file_; }

private:
    const int file_;
};

// A file that is read piece by piece. If it becomes shorter while it is open, the read is an Error; a mapped
// file would end the program with SIGBUS.
class InputFile {
public:
    explicit InputFile(const std::string& path)
        : path_(path), file_(path, O_RDONLY | O_NONBLOCK) {  // non-blocking: path may be a pipe
        struct stat status;
        if (file_ < 0 || ::fstat(file_, &status)) fail();
        if (!S_ISREG(status.st_mode)) throw Error(path, " is not a regular file; give a file.");
        bytes_ = status.st_size;
    }
    const std::string& path() const { return path_; }
    int64_t bytes() const { return bytes_; }
    void read(int64_t at, void* to, int64_t bytes) const {
        for (char* next = static_cast<char*>(to); bytes > 0;) {
            const ssize_t got = ::pread(file_, next, size_t(bytes), at);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) fail();
            if (got == 0) throw Error(path_, " became shorter while it was in use; restore the file.");
            next += got, at += got, bytes -= got;
        }
    }

protected:
    int descriptor() const { return file_; }
    [[noreturn]] void fail() const {
        throw Error("Cannot read ", path_, " (", std::strerror(errno), "); check path and permissions.");
    }

private:
    std::string path_;
    Descriptor file_;
    int64_t bytes_ = 0;
};

// A whole file as memory, read only. Pages are read when they are touched, so the file may be larger than
// memory. data() is null if the file is empty. A file that becomes shorter meanwhile ends the program.
class MappedFile : public InputFile {
public:
    explicit MappedFile(const std::string& path) : InputFile(path) {
        if (bytes()) memory_ = ::mmap(nullptr, size_t(bytes()), PROT_READ, MAP_SHARED, descriptor(), 0);
        if (memory_ == MAP_FAILED) fail();
    }
    ~MappedFile() {
        if (memory_) ::munmap(memory_, size_t(bytes()));
    }
    const uint8_t* data() const { return static_cast<const uint8_t*>(memory_); }

private:
    void* memory_ = nullptr;
};

// A file that is written. Without finish() the destructor removes it.
class OutputFile {
public:
    explicit OutputFile(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "wbe")) {
        if (!file_) fail();
    }
    OutputFile(const OutputFile&) = delete;
    ~OutputFile() {
        if (file_) std::fclose(file_), ::unlink(path_.c_str());
    }
    void write(const void* data, int64_t bytes) {
        if (std::fwrite(data, 1, size_t(bytes), file_) != size_t(bytes)) fail();
    }
    void finish() {  // waits until the bytes are on disk
        if (std::fflush(file_) || ::fsync(::fileno(file_))) fail();
        if (std::fclose(std::exchange(file_, nullptr))) fail();
    }

private:
    [[noreturn]] void fail() const {
        throw Error("Cannot write ", path_, " (", std::strerror(errno),
                    "); free some space, or give another folder with --out.");
    }
    std::string path_;
    FILE* file_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
    OutputFile file(path);
    file.write(bytes.data(), int64_t(bytes.size()));
    file.finish();
}

// A new or renamed file survives a power failure only once its folder is synced. Some file systems cannot
// sync a folder and return EINVAL; that is no error.
inline void sync_folder(const std::string& folder) {
    const Descriptor file(folder, O_RDONLY | O_DIRECTORY);
    if (file >= 0 && (::fsync(file) == 0 || errno == EINVAL)) return;
    throw Error("Cannot sync ", folder, " (", std::strerror(errno),
                "); check the disk, or give another folder with --out.");
}

// Creates a folder and those above it that are missing, and syncs each folder that gets a new entry.
inline void create_folders(const std::string& folder, std::error_code& failed) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    fs::path changed = fs::absolute(folder).lexically_normal(), existing = changed;
    while (!fs::exists(existing, ignored) && existing.has_relative_path()) existing = existing.parent_path();
    fs::create_directories(folder, failed);
    while (!failed && changed != existing) sync_folder((changed = changed.parent_path()).string());
}

}  // namespace coat

// data/file.h - files as the operating system has them: mapped or read piece by piece, checked and synced when written.
//
// Every other file of data/ goes through these few lines, so that a failed read or write is always an Error that names the
// path, and a half-written file never stays behind.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../coat.h"

namespace coat {

inline bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A file that is read piece by piece. It may become shorter while it is open: that is an Error, where a mapped file
// would end the program with SIGBUS.
class InputFile {
public:
    explicit InputFile(const std::string& path) : path_(path) {
        file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // non-blocking, since path may be a pipe
        if (file_ < 0) fail();
        struct stat status;
        const bool known = ::fstat(file_, &status) == 0, regular = known && S_ISREG(status.st_mode);
        if (regular) bytes_ = status.st_size;
        else ::close(file_);
        if (!known) fail();
        if (!regular) throw Error(path + " is not a regular file; give a file.");
    }
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;
    ~InputFile() { ::close(file_); }
    int64_t bytes() const { return bytes_; }
    int descriptor() const { return file_; }
    void read(int64_t at, void* to, int64_t bytes) const {
        for (char* next = static_cast<char*>(to); bytes > 0;) {
            const ssize_t got = ::pread(file_, next, static_cast<size_t>(bytes), at);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) fail();
            if (got == 0) throw Error("Cannot read " + path_ + ", which became shorter while it was in use; restore the file.");
            next += got, at += got, bytes -= got;
        }
    }
    // A hint that these bytes are read soon: the system fetches them in the background.
    void prefetch(int64_t at, int64_t bytes) const { ::posix_fadvise(file_, at, bytes, POSIX_FADV_WILLNEED); }

private:
    [[noreturn]] void fail() const {
        throw Error("Cannot read " + path_ + " (" + std::strerror(errno) + "); check the path and its permissions.");
    }
    std::string path_;
    int file_ = -1;
    int64_t bytes_ = 0;
};

// A whole file, read only. Pages are read when touched, so that a file larger than memory works. Copies share the mapping.
struct MappedFile {
    std::string path;
    std::shared_ptr<const void> memory;  // null where the file is empty
    int64_t bytes = 0;
    const uint8_t* data() const { return static_cast<const uint8_t*>(memory.get()); }
};

inline MappedFile map_file(const std::string& path) {
    const InputFile file(path);
    MappedFile map{path, nullptr, file.bytes()};
    if (!map.bytes) return map;
    const size_t length = static_cast<size_t>(map.bytes);
    void* memory = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    if (memory == MAP_FAILED)
        throw Error("Cannot read " + path + " (" + std::strerror(errno) + "); check the path and its permissions.");
    map.memory = std::shared_ptr<const void>(memory, [length](const void* m) { ::munmap(const_cast<void*>(m), length); });
    return map;
}

// A file being written. Unless finish() was reached it is removed again.
class OutputFile {
public:
    explicit OutputFile(const std::string& path) : path_(path) {
        file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (file_ < 0) fail();
    }
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile() {
        if (file_ < 0) return;
        ::close(file_);
        ::unlink(path_.c_str());
    }
    void write(const void* data, int64_t bytes) {
        const char* next = static_cast<const char*>(data);
        while (bytes > 0) {
            const ssize_t written = ::write(file_, next, static_cast<size_t>(bytes));
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) fail();
            next += written;
            bytes -= written;
        }
    }
    void finish() {  // on the disk, not only in the page cache
        if (::fsync(file_)) fail();
        const int file = file_;
        file_ = -1;
        if (::close(file)) fail();
    }

private:
    [[noreturn]] void fail() const {
        throw Error("Cannot write " + path_ + " (" + std::strerror(errno) + "); free some space, or give another folder with --out.");
    }
    std::string path_;
    int file_ = -1;
};

// A renamed or new file is on the disk only when its folder is. Some file systems cannot sync a folder and say EINVAL.
inline void sync_folder(const std::string& folder) {
    const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool ok = file >= 0 && (::fsync(file) == 0 || errno == EINVAL);
    const int error = errno;
    if (file >= 0) ::close(file);
    if (!ok) throw Error("Cannot sync " + folder + " (" + std::strerror(error) + "); check the disk, or give another folder with --out.");
}

// A folder and those above it that are missing, on the disk.
inline void create_folders(const std::string& folder, std::error_code& failed) {
    namespace fs = std::filesystem;
    std::vector<fs::path> changed;  // folders that get a new one
    std::error_code ignored;
    for (fs::path path = fs::absolute(folder).lexically_normal(); !fs::exists(path, ignored) && path != path.parent_path(); path = path.parent_path())
        changed.push_back(path.parent_path());
    fs::create_directories(folder, failed);
    for (const fs::path& path : changed)
        if (!failed) sync_folder(path.string());
}

}  // namespace coat

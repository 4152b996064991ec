// data/files.cpp - files as memory, hashes, and writes that reach the disk (files.h).
#include "files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace coat {

MappedFile::MappedFile(const std::string& path) : path_(path) {
    // Without O_NONBLOCK, open() of a pipe would wait for a program that writes into it.
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status {};
    const bool found = file >= 0 && ::fstat(file, &status) == 0;
    const bool regular = S_ISREG(status.st_mode);
    bytes_ = status.st_size;
    device_ = status.st_dev;
    number_ = status.st_ino;
    if (found && regular && bytes_) memory_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0);
    const int error = errno;
    if (file >= 0) ::close(file);
    if (memory_ == MAP_FAILED && error == ENOMEM) throw std::bad_alloc();
    if (found && regular && memory_ != MAP_FAILED) return;
    const std::string why = found && !regular ? "it is not a regular file" : std::strerror(error);
    throw Error("Cannot read ", path, " (", why, "); check path and permissions.");
}

void MappedFile::copy(const uint8_t* from, int64_t bytes, uint8_t* to) const {
    const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status {};
    const bool found = file >= 0 && ::fstat(file, &status) == 0;
    const bool same = found && status.st_dev == device_ && status.st_ino == number_;
    int64_t got = 0;
    ssize_t n = 1;  // n is 0 at the end of the file, -1 after an error
    while (same && got < bytes && n > 0) {
        n = ::pread(file, to + got, bytes - got, from - data() + got);
        if (n > 0) got += n;
    }
    const int error = errno;
    if (file >= 0) ::close(file);
    // The mapped file may have been removed, or another file may have its name. Its memory stays readable.
    if (!same) std::memcpy(to, from, bytes);
    else if (n < 0) throw Error("Cannot read ", path_, " (", std::strerror(error), "); check the disk.");
    else if (got < bytes) throw Error(path_, " became shorter while it was in use; restore the file.");
}

MappedFile::~MappedFile() {
    if (memory_) ::munmap(memory_, bytes_);
}

uint64_t hash_bytes(const void* data, int64_t bytes, uint64_t hash) {
    for (int64_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, static_cast<const char*>(data) + at, std::min<int64_t>(8, bytes - at));
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;  // this step and the next are bijections
        hash ^= hash >> 32;
    }
    return hash;
}

// Each MiB is hashed by itself, so that all threads work. Its hash begins with its place, so that the order
// of the MiBs counts.
uint64_t hash_of(const MappedFile& file) {
    constexpr int64_t PART = 1 << 20;
    uint64_t hash = file.bytes();
#pragma omp parallel for reduction(^ : hash)
    for (int64_t at = 0; at < file.bytes(); at += PART)
        hash ^= hash_bytes(file.data() + at, std::min(PART, file.bytes() - at), at);
    return hash;
}

std::string hash_file(const std::string& path) { return std::to_string(hash_of(MappedFile(path))); }

void close_and_sync(std::ofstream& file, const std::string& path) {
    file.close();
    if (!file)
        throw Error("Cannot write ", path,
                    "; the disk may be full: free some space, or give another folder with --out.");
    sync(path);
}

void save_file(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary);
    file << bytes;
    close_and_sync(file, path);
}

// Some file systems cannot sync a folder, and return EINVAL. That is no error.
void sync(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool ok = file >= 0 && (::fsync(file) == 0 || errno == EINVAL);
    const std::string why = std::strerror(errno);
    if (file >= 0) ::close(file);
    if (!ok) throw Error("Cannot sync ", path, " (", why, "); check the disk, or give another --out.");
}

}  // namespace coat

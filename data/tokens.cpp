// data/tokens.cpp - text and token files to streams of tokens, and streams to micro-batches (tokens.h).
#include "tokens.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <unordered_set>

#include "file.h"
#include "json.h"

#ifndef COAT_HEADERS
#define COAT_HEADERS ""  // the Makefile's list of the compiler's header folders, separated by colons
#endif

namespace coat {
namespace fs = std::filesystem;

// ---------------------------------------------------------------------------------------------------------------------
// TokenStream

TokenStream::TokenStream(std::shared_ptr<const void> memory, int width, int64_t count) : count_(count) {
    if (count) segments_.push_back({std::move(memory), nullptr, 0, width, 0, count});
}

TokenStream::TokenStream(std::shared_ptr<const InputFile> file, int64_t at, int width, int64_t count) : count_(count) {
    if (count) segments_.push_back({nullptr, std::move(file), at, width, 0, count});
}

const TokenStream::Segment* TokenStream::segment(int64_t i) const {  // that token i lies in
    const auto after = std::upper_bound(segments_.begin(), segments_.end(), i, [](int64_t at, const Segment& s) { return at < s.first; });
    return &*std::prev(after);
}

template <class Token>
static void widen(const uint8_t* bytes, int64_t count, int32_t* tokens) {
    for (int64_t i = 0; i < count; i++) {
        Token token;
        std::memcpy(&token, bytes + i * static_cast<int64_t>(sizeof token), sizeof token);
        tokens[i] = static_cast<int32_t>(token);
    }
}

void TokenStream::read(int64_t first, int64_t count, int32_t* tokens) const {
    std::vector<uint8_t> buffer;
    for (const Segment* s = count ? segment(first) : nullptr; count > 0; s++) {
        const int64_t n = std::min(count, s->first + s->count - first), at = s->at + (first - s->first) * s->width;
        if (s->file) {
            buffer.resize(static_cast<size_t>(n * s->width));
            s->file->read(at, buffer.data(), n * s->width);
        }
        const uint8_t* bytes = s->file ? buffer.data() : static_cast<const uint8_t*>(s->memory.get()) + at;
        (s->width == 1 ? widen<uint8_t> : s->width == 2 ? widen<uint16_t> : widen<uint32_t>)(bytes, n, tokens);
        tokens += n, first += n, count -= n;
    }
}

void TokenStream::prefetch(int64_t first, int64_t count) const {
    const Segment* s = segment(first);  // what lies beyond its end is left to the read
    if (s->file) s->file->prefetch(s->at + (first - s->first) * s->width, std::min(count, s->first + s->count - first) * s->width);
}

int32_t TokenStream::operator[](int64_t i) const {
    int32_t token;
    read(i, 1, &token);
    return token;
}

TokenStream TokenStream::part(int64_t first, int64_t count) const {
    TokenStream result;
    for (Segment s : segments_) {
        const int64_t begin = std::max(first, s.first), end = std::min(first + count, s.first + s.count);
        if (begin >= end) continue;
        s.at += (begin - s.first) * s.width;
        s.first = result.count_;
        s.count = end - begin;
        result.count_ += s.count;
        result.segments_.push_back(std::move(s));
    }
    return result;
}

void TokenStream::append(const TokenStream& other) {
    for (Segment s : other.segments_) {
        s.first = count_;
        count_ += s.count;
        segments_.push_back(std::move(s));
    }
}

int64_t TokenStream::largest() const {
    int64_t most = -1;
    std::vector<int32_t> tokens(1 << 16);
    for (int64_t first = 0; first < count_; first += static_cast<int64_t>(tokens.size())) {
        const int64_t count = std::min(count_ - first, static_cast<int64_t>(tokens.size()));
        read(first, count, tokens.data());
        uint32_t largest = 0;
        for (int64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<uint32_t>(tokens[static_cast<size_t>(i)]));
        most = std::max(most, static_cast<int64_t>(largest));
    }
    return most;
}

// ---------------------------------------------------------------------------------------------------------------------
// Vocabulary

Vocabulary Vocabulary::bytes() {
    Vocabulary v;
    for (int byte = 0; byte < 256; byte++) v.pieces_.push_back(std::string(1, static_cast<char>(byte)));
    return v;
}

// In the table a piece is text whose code points U+0000 to U+00FF stand for the bytes: JSON has no other bytes. False on
// other code points.
static bool bytes_of(const std::string& utf8, std::string* bytes) {
    for (size_t i = 0; i < utf8.size(); i++) {
        const auto c = static_cast<uint8_t>(utf8[i]);
        if (c >= 0x80 && ((c != 0xC2 && c != 0xC3) || ++i == utf8.size())) return false;
        *bytes += static_cast<char>(c < 0x80 ? c : (c & 3) << 6 | (utf8[i] & 0x3F));
    }
    return true;
}

Vocabulary Vocabulary::read(const std::string& path) {
    auto require = [&](bool ok) {
        if (!ok) throw Error(path + " is not a vocabulary table of version 1; write it again with data/tokenize.py.");
    };
    using nlohmann::json;
    const MappedFile file = map_file(path);
    std::string why;
    const json table = parse_json(file.data(), file.bytes, &why);
    require(why.empty() && table.value("format", json()) == "coat vocabulary" && table.value("version", json()) == 1);
    const json pieces = table.value("pieces", json());
    require(pieces.is_array() && !pieces.empty() && table.value("size", json()) == pieces.size());
    Vocabulary v;
    for (const json& piece : pieces) {
        require(piece.is_string());
        v.pieces_.emplace_back();
        require(bytes_of(piece.get_ref<const std::string&>(), &v.pieces_.back()));
    }
    return v;
}

std::string Vocabulary::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (int32_t t : tokens) {
        const bool known = t >= 0 && t < size() && !pieces_[static_cast<size_t>(t)].empty();
        text += known ? pieces_[static_cast<size_t>(t)] : "<" + std::to_string(t) + ">";
    }
    return text;
}

// The longest piece that the text goes on with, again and again. Pieces are sorted: those that agree with the text in its
// next n bytes are a range, which shrinks as n grows.
std::vector<int32_t> Vocabulary::encode(const std::string& text) const {
    std::vector<size_t> sorted(pieces_.size());
    std::iota(sorted.begin(), sorted.end(), size_t{0});
    std::stable_sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return pieces_[a] < pieces_[b]; });
    auto byte = [](const std::string& s, size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : -1; };

    std::vector<int32_t> tokens;
    for (size_t at = 0; at < text.size();) {
        size_t best = 0, length = 0;
        auto first = sorted.begin(), last = sorted.end();
        for (size_t n = 0; first != last && at + n < text.size(); n++) {
            const int wanted = byte(text, at + n);
            first = std::partition_point(first, last, [&](size_t t) { return byte(pieces_[t], n) < wanted; });
            last = std::partition_point(first, last, [&](size_t t) { return byte(pieces_[t], n) == wanted; });
            // Of equal pieces the last counts: in Llama 2 the first are a fallback that text does not use.
            const auto longer = std::partition_point(first, last, [&](size_t t) { return pieces_[t].size() == n + 1; });
            if (longer != first) best = *std::prev(longer), length = n + 1;
        }
        if (!length) {  // of a character of several bytes all
            uint32_t point;
            const size_t bytes = std::max<size_t>(1, utf8_character(text, at, &point));
            throw Error("The vocabulary has no piece for \"" + escaped(text.substr(at, bytes)) + "\"; give another --prompt.");
        }
        tokens.push_back(static_cast<int32_t>(best));
        at += length;
    }
    return tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// Corpora. Text is bytes; its files come in the byte order of their paths, whatever the locale.

namespace {

constexpr int64_t MIB = 1 << 20;
constexpr int64_t MAX_HEADERS = 32 * MIB;      // of text in all: enough, and read within a blink
constexpr int64_t MAX_HEADER_FILE = MIB / 4;   // larger headers are generated tables of numbers, not code
constexpr size_t HELD_OUT_FILE = 20;           // every 20th file is held out,
constexpr int64_t HELD_OUT_PART = 10;          // or, of fewer files, the last tenth

const char* VOCABULARY_FILE = "vocabulary.json";

std::vector<std::string> split(const std::string& list, char separator) {
    std::vector<std::string> items;
    for (size_t begin = 0; begin <= list.size();) {
        const size_t end = std::min(list.find(separator, begin), list.size());
        if (end > begin) items.push_back(list.substr(begin, end - begin));
        begin = end + 1;
    }
    return items;
}

bool is_token_file(const std::string& path) { return ends_with(path, ".bin"); }

// All regular files under a folder but hidden ones, in the byte order of their paths.
std::vector<std::string> files_under(const std::string& folder) {
    std::vector<std::string> paths;
    try {
        const auto options = fs::directory_options::skip_permission_denied;
        for (auto entry = fs::recursive_directory_iterator(folder, options); entry != fs::recursive_directory_iterator(); ++entry) {
            const bool hidden = entry->path().filename().string()[0] == '.';
            std::error_code ignored;  // a link that leads nowhere, or to itself, is no file
            if (hidden && entry->is_directory(ignored)) entry.disable_recursion_pending();
            if (!hidden && entry->is_regular_file(ignored)) paths.push_back(entry->path().string());
        }
    } catch (const fs::filesystem_error& e) {
        throw Error("Cannot read folder " + folder + " (" + e.code().message() + "); check the path and its permissions.");
    }
    std::sort(paths.begin(), paths.end());
    return paths;
}

// Texts to train on and to validate with. No text is taken twice, under whatever names: a copy of a file that is trained on
// would make validation easier than it is.
class TextCollection {
public:
    static bool is_text(const MappedFile& file) { return file.bytes && !std::memchr(file.data(), 0, static_cast<size_t>(file.bytes)); }
    // False if it is not text (has a NUL) or was taken before.
    bool add(const MappedFile& file) {
        if (!is_text(file)) return false;  // seen before it is copied: data folders may hold large binaries
        std::string text(reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.bytes));
        if (!seen_.insert(std::hash<std::string>()(text)).second) return false;
        bytes_ += file.bytes;
        texts_.push_back(std::move(text));
        return true;
    }
    bool empty() const { return texts_.empty(); }
    int64_t bytes() const { return bytes_; }

    Corpus corpus(const std::string& what) const {
        const bool by_file = texts_.size() >= HELD_OUT_FILE;
        std::string train, validation;
        for (size_t i = 0; i < texts_.size(); i++) {
            const bool held_out = by_file && i % HELD_OUT_FILE == HELD_OUT_FILE / 2;
            (held_out ? validation : train) += texts_[i];
        }
        Corpus c;
        c.train = stream(std::move(train));
        c.validation = stream(std::move(validation));
        if (!by_file) hold_out_the_end(c);
        c.vocabulary = Vocabulary::bytes();
        c.tokens_in_use = c.vocabulary.size();
        c.description = what + ": " + std::to_string(texts_.size()) + " files, " + std::to_string(c.train.size()) + " bytes to train on, " +
                        std::to_string(c.validation.size()) + " held out (" + (by_file ? "every 20th file" : "the last tenth") + ")";
        return c;
    }

    static void hold_out_the_end(Corpus& c) {
        const int64_t held_out = ceil_div(c.train.size(), HELD_OUT_PART), kept = c.train.size() - held_out;
        c.validation = c.train.part(kept, held_out);
        c.train = c.train.part(0, kept);
    }

private:
    static TokenStream stream(std::string text) {
        auto memory = std::make_shared<const std::string>(std::move(text));
        const int64_t count = static_cast<int64_t>(memory->size());
        return TokenStream(std::shared_ptr<const void>(memory, memory->data()), 1, count);
    }
    std::vector<std::string> texts_;
    std::unordered_set<size_t> seen_;
    int64_t bytes_ = 0;
};

Corpus load_headers(const std::string& folders) {
    TextCollection texts;
    std::string present;
    for (const std::string& folder : split(folders, ':')) {
        if (!fs::is_directory(folder)) continue;
        present += (present.empty() ? "" : ", ") + folder;
        for (const std::string& path : files_under(folder)) {
            std::error_code unreadable;
            const auto bytes = static_cast<int64_t>(fs::file_size(path, unreadable));
            if (unreadable || bytes > MAX_HEADER_FILE || texts.bytes() + bytes > MAX_HEADERS) continue;
            texts.add(map_file(path));
        }
    }
    if (texts.empty()) throw Error("The compiler's headers are not on this machine (looked in \"" + folders + "\"); give text with --data.");
    return texts.corpus("C and C++ headers of this machine (" + present + ")");
}

Corpus load_text(const std::string& data, const std::vector<std::string>& paths) {
    TextCollection texts;
    for (const std::string& path : paths) {
        if (fs::is_directory(path)) {
            for (const std::string& file : files_under(path)) texts.add(map_file(file));
            continue;
        }
        const MappedFile file = map_file(path);
        if (!file.bytes) throw Error("--data " + path + " is empty; give a text file or a token file.");
        if (!TextCollection::is_text(file))
            throw Error("--data " + path + " is not text, it holds NUL bytes; give a text file, or a token file whose name ends in .bin.");
        texts.add(file);
    }
    if (texts.empty()) throw Error("--data " + data + " holds no text; give text files, folders of them, or token files (*.bin).");
    return texts.corpus(escaped(data));
}

// llm.c's token files: 256 int32 (magic, version, number of tokens), then the tokens.
struct TokenFormat {
    int32_t magic;
    int width;
    int32_t newest_version;
};
constexpr TokenFormat TOKEN_FORMATS[] = {{20240520, 2, 1}, {20240801, 4, 7}};  // llm.c calls its first version with 4 bytes 7
constexpr int64_t TOKEN_HEADER = 256 * 4;

TokenStream read_token_file(const std::string& path) {
    auto require = [&](bool ok, const std::string& what) {
        if (!ok) throw Error("--data " + path + " " + what + "; write it again with data/tokenize.py.");
    };
    const auto file = std::make_shared<const InputFile>(path);
    require(file->bytes() >= TOKEN_HEADER, "is truncated: it is shorter than a token file's header");
    int32_t header[3];
    file->read(0, header, sizeof header);
    const auto format = std::find_if(std::begin(TOKEN_FORMATS), std::end(TOKEN_FORMATS), [&](const TokenFormat& f) { return f.magic == header[0]; });
    require(format != std::end(TOKEN_FORMATS), "is not a token file: its magic number is " + std::to_string(header[0]) + ", not 20240520 or 20240801");
    require(header[1] == 1 || header[1] == format->newest_version, "is a token file of version " + std::to_string(header[1]) + ", which is not known");
    const int64_t count = header[2], bytes = file->bytes() - TOKEN_HEADER;
    require(count > 0, "holds no tokens");
    require(bytes == count * format->width, "is truncated or damaged: " + std::to_string(count) + " tokens need " + std::to_string(count * format->width) +
                                             " bytes, it has " + std::to_string(bytes));
    const TokenStream tokens(file, TOKEN_HEADER, format->width, count);
    require(tokens.largest() <= INT32_MAX, "is damaged: it holds token " + std::to_string(tokens.largest()));
    return tokens;
}

Corpus load_tokens(const std::string& data, const std::vector<std::string>& paths) {
    Corpus c;
    TokenStream unnamed;
    for (const std::string& path : paths) {
        const std::string name = fs::path(path).filename().string();
        const bool train = name.find("train") != std::string::npos, validation = name.find("val") != std::string::npos;
        (train ? c.train : validation ? c.validation : unnamed).append(read_token_file(path));
    }
    c.train.append(unnamed);
    const bool named = c.train.size() && c.validation.size();
    if (!named) {
        c.train.append(c.validation);
        TextCollection::hold_out_the_end(c);
    }
    c.tokens_in_use = 1 + std::max(c.train.largest(), c.validation.largest());

    const std::string table = (fs::path(paths[0]).parent_path() / VOCABULARY_FILE).string();
    if (fs::exists(table)) {
        c.vocabulary = Vocabulary::read(table);
        if (c.vocabulary.size() < c.tokens_in_use)
            throw Error("--data " + paths[0] + ": token " + std::to_string(c.tokens_in_use - 1) + " is beyond the " + std::to_string(c.vocabulary.size()) +
                        " of " + table + "; write both again with data/tokenize.py.");
    }
    c.description = escaped(data) + ": " + std::to_string(paths.size()) + " token files, " + std::to_string(c.train.size()) + " tokens to train on, " +
                    std::to_string(c.validation.size()) + " held out (" + (named ? "the files named val" : "the last tenth") + ")";
    return c;
}

// A folder with token files stands for them; other paths stand for themselves.
std::vector<std::string> expand(const std::string& path) {
    if (!fs::is_directory(path)) return {path};
    std::vector<std::string> tokens;
    for (const std::string& file : files_under(path))
        if (is_token_file(file)) tokens.push_back(file);
    return tokens.empty() ? std::vector<std::string>{path} : tokens;
}

}  // namespace

Corpus load_corpus(const std::string& data) {
    if (data.empty()) return load_headers(COAT_HEADERS);
    std::vector<std::string> paths;
    for (const std::string& path : split(data, ',')) {
        std::error_code unreachable;
        if (!fs::exists(path, unreachable)) throw Error("--data " + path + " does not exist; give text files, folders of them, or token files (*.bin).");
        for (const std::string& file : expand(path)) paths.push_back(file);
    }
    const auto tokens = std::count_if(paths.begin(), paths.end(), is_token_file);
    if (tokens == 0) return load_text(data, paths);
    if (tokens == static_cast<int64_t>(paths.size())) return load_tokens(data, paths);
    throw Error("--data " + data + " mixes token files (*.bin) and text; give one kind.");
}

// ---------------------------------------------------------------------------------------------------------------------
// Loader

static uint64_t mix(uint64_t z) {  // splitmix64's finalizer
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Element i of a permutation of [0, n): a Feistel network permutes [0, 4^half) whatever its round function; walking its
// cycle until a value falls below n makes that a permutation of [0, n). No table, so an epoch of any length costs nothing.
static int64_t permute(uint64_t key, int64_t n, int64_t i) {
    constexpr uint64_t ROUNDS = 6;
    int half = 1;
    while (int64_t{1} << 2 * half < n) half++;
    const uint64_t mask = (uint64_t{1} << half) - 1;
    auto x = static_cast<uint64_t>(i);
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            const uint64_t next = left ^ (mix(key + mix((round << 32) + right)) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= static_cast<uint64_t>(n));
    return static_cast<int64_t>(x);
}

Loader::Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed, bool shuffle)
    : stream_(std::move(stream)), B_(B), T_(T), windows_(0), seed_(seed), shuffle_(shuffle) {
    if (B < 1 || T < 1) throw Error("--batch and --seq must be at least 1.");
    windows_ = (stream_.size() - 1) / T;
    if (stream_.size() <= T || windows_ < B)
        throw Error("--data has " + std::to_string(stream_.size()) + " tokens in one of its parts (to train on, or held out), fewer than one batch of --batch " +
                    std::to_string(B) + " and --seq " + std::to_string(T) + " needs; give more text, or make --batch or --seq smaller.");
}

int64_t Loader::window(Position p) const {
    const uint64_t key = mix(seed_ + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(p.epoch + 1));
    return shuffle_ ? permute(key, windows_, p.window) : p.window;
}

Loader::Position Loader::after(Position p) const {
    return p.window + 1 < windows_ ? Position{p.epoch, p.window + 1} : Position{p.epoch + 1, 0};
}

void Loader::next(int32_t* tokens, int32_t* targets) {
    std::vector<int32_t> both(static_cast<size_t>(T_ + 1));
    for (int64_t b = 0; b < B_; b++) {
        stream_.read(window(position_) * T_, T_ + 1, both.data());
        std::copy(both.begin(), both.end() - 1, tokens + b * T_);
        std::copy(both.begin() + 1, both.end(), targets + b * T_);
        position_ = after(position_);
    }
}

void Loader::prefetch(int64_t batches) const {
    Position p = position_;
    for (int64_t i = 0; i < batches * B_; i++, p = after(p)) stream_.prefetch(window(p) * T_, T_ + 1);
}

void Loader::seek(Position p) {
    if (p.epoch < 0 || p.window < 0 || p.window >= windows_)
        throw Error("The run stopped at window " + std::to_string(p.window) + " of its data, but --data has " + std::to_string(windows_) +
                    " of them; give the same --data, --batch and --seq.");
    position_ = p;
}

}  // namespace coat

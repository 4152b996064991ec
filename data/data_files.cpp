// data/data_files.cpp - finds the files of --data and tells what is no data (data_files.h).
#include "data_files.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <sys/stat.h>

#include "files.h"
#include "json.h"
#include "tokenizer_files.h"

namespace coat {

// The device of a file, and its number there. Two paths lead to the same file if both are equal.
using FileId = std::pair<uint64_t, uint64_t>;
static std::optional<FileId> id_of(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return {};
    return FileId{status.st_dev, status.st_ino};
}

static bool has_ending(const std::string& path, std::initializer_list<const char*> endings) {
    return std::any_of(endings.begin(), endings.end(), [&](const char* end) { return path.ends_with(end); });
}
static bool is_compressed(const std::string& path) {
    return has_ending(path, {".gz", ".bz2", ".xz", ".zst", ".zip"});
}

// Whether the folder has a file model*.safetensors*: the weights of a model, one of several files of them, or
// their index. data/records.py has the same rule.
static bool holds_model(const std::string& folder) {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(folder, none)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("model") && name.find(".safetensors") != name.npos) return true;
    }
    return false;
}

namespace {

// Collects the files below a folder. Links to files are followed. Links to folders are not, because they
// could lead in a circle, or to everything above the data. (data/records.py has the same rule.)
class Walk {
public:
    Walk(const std::set<FileId>& written, std::vector<LeftOut>& left_out)
        : written_(written), left_out_(left_out) {}

    std::vector<std::string> files_below(const std::string& folder) {
        enter(folder);
        return files_;
    }

private:
    void enter(const std::string& folder) {
        std::error_code failed;
        std::vector<std::string> names;
        for (const auto& entry : fs::directory_iterator(folder, failed))
            names.push_back(entry.path().filename().string());
        if (failed) leave_out(folder, "cannot be read (" + failed.message() + ")");
        std::sort(names.begin(), names.end());
        for (const std::string& name : names)
            if (name[0] != '.') visit(path_in(folder, name));
    }

    void visit(const std::string& path) {
        std::error_code none;
        const std::optional<FileId> id = id_of(path);
        if (!id) return leave_out(path, "is a link that leads nowhere");
        if (written_.count(*id)) return leave_out(path, "is written by this run");
        if (fs::is_regular_file(path, none)) return files_.push_back(path);
        if (!fs::is_directory(path, none)) return leave_out(path, "is neither a file nor a folder");
        if (fs::is_symlink(path, none))
            return leave_out(path, "is a link to a folder; give that folder, too");
        if (holds_model(path)) return leave_out(path, "is a model or a checkpoint");
        enter(path);
    }

    void leave_out(const std::string& path, const std::string& reason) {
        left_out_.push_back({path, reason});
    }

    const std::set<FileId>& written_;
    std::vector<LeftOut>& left_out_;
    std::vector<std::string> files_;
};

}  // namespace

// The data among the files of a folder, in the byte order of their paths: the token files or, if there are
// none, the files that may be text.
static std::vector<std::string> data_in_folder(const std::string& folder, std::vector<std::string> files,
                                               std::vector<LeftOut>& left_out) {
    std::sort(files.begin(), files.end());
    std::vector<std::string> tokens, texts;
    std::vector<LeftOut> no_text;
    int64_t others = 0;  // files that are neither tokens nor part of a tokenizer
    for (const std::string& path : files) {
        const bool is_tokens = is_token_file(path);
        others += !is_tokens && !is_tokenizer_file(fs::path(path).filename().string());
        if (is_tokens) tokens.push_back(path);
        else if (is_compressed(path)) no_text.push_back({path, "is compressed; unpack it"});
        else if (has_ending(path, {".jsonl", ".parquet"}))
            no_text.push_back({path, "has records, not text; data/tokenize.py makes token files of it"});
        else texts.push_back(path);
    }
    if (tokens.empty()) {
        left_out.insert(left_out.end(), no_text.begin(), no_text.end());
        return texts;
    }
    if (others)
        left_out.push_back({folder, concat("has token files; its ", others, " other files are no data")});
    return tokens;
}

// A file that a flag, --data or --val, names itself must be data.
static void require_data_file(const char* flag, const std::string& path) {
    if (has_ending(path, {".jsonl", ".json", ".parquet"}))
        throw Error(flag, " ", path, " has records, not text; make token files of it: ",
                    "python3 data/tokenize.py --tokenizer FOLDER --seq 2048 --out tokens ", path,
                    " (conversations; texts without --seq).");
    if (is_compressed(path))
        throw Error(flag, " ", path, " is compressed; unpack it, and give what is in it.");
}

bool is_token_file(const std::string& path) { return path.ends_with(".bin"); }

// Adds the files that a flag names, separated by commas, to `found`; `seen` has those that are there already.
static void add_files_of(const char* flag, const std::string& items, const std::set<FileId>& written,
                         std::set<FileId>& seen, FoundFiles& found) {
    std::istringstream list(items);
    for (std::string item; std::getline(list, item, ',');) {
        std::vector<std::string> files = {item};
        std::error_code none;
        if (fs::is_directory(item, none))
            files = data_in_folder(item, Walk(written, found.left_out).files_below(item), found.left_out);
        else require_data_file(flag, item);
        for (const std::string& file : files) {
            if (file.ends_with("tokenizer.bin")) continue;
            // A file that does not exist becomes an error when it is read.
            if (const auto id = id_of(file); !id || seen.insert(*id).second) found.paths.push_back(file);
        }
    }
}

FoundFiles find_data_files(const std::string& data, const std::vector<std::string>& written,
                           const std::string& val) {
    std::set<FileId> written_ids, seen;
    for (const std::string& path : written)
        if (const auto id = id_of(path)) written_ids.insert(*id);
    FoundFiles found;
    add_files_of("--val", val, written_ids, seen, found);
    found.held_out_count = found.paths.size();
    add_files_of("--data", data, written_ids, seen, found);
    return found;
}

size_t utf8_length(std::string_view bytes) {
    size_t at = 0;
    while (at < bytes.size()) {
        uint64_t eight = ~0ull;  // most text is ASCII, which is checked eight bytes at a time
        if (at + 8 <= bytes.size()) std::memcpy(&eight, &bytes[at], 8);
        const bool ascii = (eight & 0x8080808080808080) == 0;
        const size_t length = ascii ? 8 : utf8_character_length(bytes.substr(at));
        if (length == 0) break;
        at += length;
    }
    return at;
}

std::string why_not_text(std::string_view bytes) {
    const size_t nul = bytes.find('\0'), valid = utf8_length(bytes);
    if (nul == bytes.npos && valid == bytes.size()) return "";

    // UTF-16 begins with a byte order mark, or has NUL in every other byte where it is mostly ASCII. UTF-32
    // begins with the mark of UTF-16 and two NULs, or with two NULs and the mark.
    const std::string_view start = bytes.substr(0, 4096);
    int64_t nuls[2] = {};  // how many there are at even and at odd places
    for (size_t i = 0; i < start.size(); i++) nuls[i % 2] += start[i] == '\0';
    const int64_t most = std::max(nuls[0], nuls[1]), least = std::min(nuls[0], nuls[1]);
    const bool marked = start.starts_with("\xFF\xFE") || start.starts_with("\xFE\xFF") ||
                        start.starts_with(std::string_view("\0\0\xFE\xFF", 4));
    const bool mostly_ascii = bytes.size() % 2 == 0 && least == 0 && most * 4 > int64_t(start.size());
    if (marked || mostly_ascii)
        return "is UTF-16 or UTF-32; convert it to UTF-8, say with iconv -f UTF-16 -t UTF-8";
    if (nul != bytes.npos) return concat("is no text, because it has a NUL byte (byte ", nul, ")");
    // The last character is incomplete if some further bytes would complete it.
    for (const char* rest : {"\x80\x80\x80", "\x90\x80\x80", "\xA0\x80\x80"})
        if (valid + 4 > bytes.size() && utf8_character_length(concat(bytes.substr(valid), rest)) > 0)
            return concat("ends in the middle of a UTF-8 character; cut it after ", valid, " bytes");
    return concat("is not UTF-8 (byte ", valid, "); convert it to UTF-8 if it is text");
}

std::vector<std::string> sentences_of(const std::vector<LeftOut>& left_out) {
    constexpr size_t NAMED = 10;
    std::vector<std::string> sentences;
    for (size_t i = 0; i < std::min(NAMED, left_out.size()); i++)
        sentences.push_back("left out: " + left_out[i].path + " " + left_out[i].reason);
    if (left_out.size() > NAMED) sentences.push_back(concat("left out: ", left_out.size() - NAMED, " more"));
    return sentences;
}

std::string utf8_path(const std::string& path) {
    return json::parse(json(path).dump(-1, ' ', false, json::error_handler_t::replace));
}

std::string DataFile::line() const { return concat(bytes, " ", hash, " ", utf8_path(path)); }

DataFile DataFile::from_line(const std::string& line) {
    DataFile file{};
    std::istringstream words(line);
    words >> file.bytes >> file.hash;
    words.get();
    file.path.assign(std::istreambuf_iterator<char>(words), {});
    return file;
}

std::string difference(const std::vector<DataFile>& before, const std::vector<DataFile>& now) {
    auto has = [](const std::vector<DataFile>& files, const std::string& path) {
        const auto is_it = [&](const DataFile& file) { return utf8_path(file.path) == utf8_path(path); };
        return std::any_of(files.begin(), files.end(), is_it);
    };
    for (size_t i = 0; i < std::max(before.size(), now.size()); i++) {
        if (i == now.size()) return before[i].path + " is missing";
        if (i == before.size()) return now[i].path + " is new";
        const DataFile &old = before[i], &file = now[i];
        if (file.hash == old.hash && file.bytes == old.bytes) continue;
        const bool same_path = utf8_path(file.path) == utf8_path(old.path);
        if (!same_path && has(before, file.path)) return old.path + " is missing";
        if (!same_path && has(now, old.path)) return file.path + " is new";
        if (file.bytes != old.bytes) return concat(file.path, " has ", file.bytes, " bytes, not ", old.bytes);
        return file.path + " has other bytes";
    }
    return "";
}

}  // namespace coat

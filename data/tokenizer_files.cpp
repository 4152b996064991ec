// data/tokenizer_files.cpp - finds, compares and reads the files of tokenizers (tokenizer_files.h).
#include "tokenizer_files.h"

#include <set>

#include "files.h"
#include "json.h"
#include "vocabulary.h"

namespace coat {

bool is_tokenizer_file(const std::string& name) {
    for (const char* begin :
         {"tokenizer", "tokenization_", "vocab", "merges", "tekken", "special_tokens_map", "added_tokens"})
        if (name.starts_with(begin) && name != "tokenizer.bin") return true;  // tokenizer.bin is llm.c's
    for (const char* end : {".model", ".tiktoken", ".spm"})  // files of SentencePiece and OpenAI
        if (name.ends_with(end)) return true;
    return false;
}

std::string tokenizer_in(const std::string& folder) {
    std::set<std::string> names;
    std::error_code none;  // a folder that does not exist has no files
    for (const auto& entry : fs::directory_iterator(folder, none)) {
        const std::string name = entry.path().filename().string();
        if (is_tokenizer_file(name) && entry.is_regular_file(none)) names.insert(name);
    }
    return names.empty() ? "" : *names.begin();
}

// The tokens of tokenizer.json by their text, without those that were added later; null if it has no such
// list: Python has other kinds of tokenizers.
static json tokens_by_text(const std::string& folder) {
    try {
        return read_json(path_in(folder, "tokenizer.json")).get<Fields>("model").get<Fields>("vocab").object;
    } catch (const Error&) {
        return {};
    }
}

bool tokenizers_differ(const std::string& a, const std::string& b) {
    const std::string file_a = path_in(a, "tokenizer.bin"), file_b = path_in(b, "tokenizer.bin");
    if (fs::exists(file_a) && fs::exists(file_b)) {
        const std::vector<std::string> x = read_vocabulary(file_a).pieces, y = read_vocabulary(file_b).pieces;
        const auto common = std::ptrdiff_t(std::min(x.size(), y.size()));  // tokens may be added at the end
        return !std::equal(x.begin(), x.begin() + common, y.begin());
    }
    const json x = tokens_by_text(a), y = tokens_by_text(b);
    return !x.is_null() && !y.is_null() && x != y;
}

// The files of a folder, and of its folder of chat templates, that have such a name.
template <class Wanted>
static FileContents files_of_folder(const std::string& folder, const Wanted& is_wanted) {
    FileContents files;
    std::error_code none;  // a folder that does not exist has no files
    for (const fs::path below : {"", "additional_chat_templates"})
        for (const auto& entry : fs::directory_iterator(folder / below, none)) {
            const std::string name = entry.path().filename().string();
            if (!is_wanted(name) || !entry.is_regular_file(none)) continue;
            files[(below / name).string()] = MappedFile(entry.path().string()).text();
        }
    return files;
}

static bool is_of_tokenizer(const std::string& name) {
    return is_tokenizer_file(name) || name.ends_with(".jinja") || name == "chat_template.json";
}

FileContents read_other_files(const std::string& folder) {
    return files_of_folder(folder, [](const std::string& name) {
        return is_of_tokenizer(name) || is_one_of("config.json generation_config.json tokenizer.bin", name);
    });
}

void add_tokenizer(const std::string& folder, FileContents& files) {
    for (const auto& [name, bytes] : files)
        if (is_tokenizer_file(name)) return;
    files.merge(files_of_folder(folder, is_of_tokenizer));
}

}  // namespace coat

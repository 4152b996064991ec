// data/json.cpp - reads JSON whose depth and size are limited (json.h).
#include "json.h"

#include "files.h"

namespace coat {

void Fields::reject(const std::string& field, const std::string& expected) const {
    const std::string found = has(field) ? object[field].dump().substr(0, 100) : "missing";
    throw Error(path, ": the field ", field.substr(0, 100), " must be ", expected, ", but it is ", found,
                "; correct it, or download or save the file again.");
}

// The library parses nested values iteratively, but prints and copies them recursively, and its values take
// many times the memory of the text. So depth and size are limited before it parses.
Fields parse_json(const std::string& path, std::string_view text) {
    constexpr int MAX_DEPTH = 32;
    constexpr size_t MAX_BYTES = 32 << 20;
    const auto expect = [&](bool ok, const char* expected) {
        if (!ok) throw Error(path, " is not a JSON object ", expected, "; download or save it again.");
    };
    expect(text.size() <= MAX_BYTES, "of at most 32 MiB");
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c == '"') in_string = !in_string;
        if (in_string && c == '\\') i++;  // the character after a backslash is escaped
        if (in_string) continue;
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        expect(depth <= MAX_DEPTH, "of at most 32 levels");
    }
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    expect(value.is_object() && text.find('\0') == text.npos, "in whole");
    return {path, std::move(value)};
}

Fields read_json(const std::string& path) {
    const MappedFile file(path);
    return parse_json(path, file.text());
}

}  // namespace coat

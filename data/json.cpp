// data/json.cpp - parses JSON within limits (json.h).
#include "json.h"

#include <cstring>

#include "file.h"

namespace coat {

using nlohmann::json;

namespace {

constexpr int MAX_DEPTH = 32;

struct Counts {  // what a text contains if it is valid JSON
    int depth = 0;
    int64_t values = 1, names = 0;
};

Counts count(const char* text, int64_t bytes) {
    Counts counts;
    int depth = 0;
    bool in_string = false;
    for (int64_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c == '"') in_string = !in_string;
        if (in_string) {
            i += c == '\\';  // skip the escaped character
            continue;
        }
        if (c == '{' || c == '[') counts.depth = std::max(counts.depth, ++depth), counts.values++;
        if (c == '}' || c == ']') depth--;
        if (c == ',') counts.values++;
        if (c == ':') counts.names++;
    }
    return counts;
}

int64_t names_in(const json& value) {
    if (!value.is_structured()) return 0;
    int64_t names = value.is_object() ? int64_t(value.size()) : 0;
    for (const json& inner : value) names += names_in(inner);
    return names;
}

}  // namespace

json parse_json(const void* data, int64_t bytes, std::string* why, int64_t max_values) {
    const char* text = static_cast<const char*>(data);
    const Counts counts = count(text, bytes);
    why->clear();
    if (counts.depth > MAX_DEPTH) *why = "is nested more than " + std::to_string(MAX_DEPTH) + " levels deep";
    else if (counts.values > max_values) *why = "has more than " + std::to_string(max_values) + " values";
    if (!why->empty()) return json();
    // The library takes a zero byte for the end of the text.
    const bool zero = bytes && std::memchr(text, 0, size_t(bytes));
    json value = zero ? json() : json::parse(text, text + bytes, nullptr, /*allow_exceptions=*/false);
    if (!value.is_object()) *why = "is not a JSON object";
    // Parsers differ on which of two equal names counts.
    else if (names_in(value) != counts.names) *why = "has a name twice in one object";
    return value;
}

json read_json(const std::string& path) {
    const MappedFile file(path);
    std::string why;
    json value = parse_json(file.data(), file.bytes(), &why);
    if (!why.empty()) throw Error(path + " " + why + "; download or save it again.");
    return value;
}

std::string Fields::excerpt(const json& value) { return escaped(value.dump()); }

void write_json(const std::string& path, const nlohmann::ordered_json& value) {
    const std::string text = value.dump(2) + "\n";
    OutputFile file(path);
    file.write(text.data(), int64_t(text.size()));
    file.finish();
}

}  // namespace coat

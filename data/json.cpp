// data/json.cpp - parsing and printing JSON (json.h), compiled once: the library's templates take seconds.
#include "json.h"

#include <cstring>

namespace coat {
namespace {

// The names in all objects of a value. An object has each name once, so there are fewer than in the text if
// one of them stands there twice.
int64_t names_in(const nlohmann::json& value) {
    if (!value.is_structured()) return 0;
    int64_t names = value.is_object() ? int64_t(value.size()) : 0;
    for (const nlohmann::json& inner : value) names += names_in(inner);
    return names;
}

}  // namespace

nlohmann::json parse_json(const void* data, int64_t bytes, std::string* why, int64_t max_values) {
    constexpr int MAX_DEPTH = 32;
    const char* text = static_cast<const char*>(data);
    // What the text contains if it is valid JSON, without parsing it.
    int depth = 0, deepest = 0;
    int64_t values = 1, names = 0;
    bool in_string = false;
    for (int64_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c == '"') in_string = !in_string;
        if (in_string) i += c == '\\';  // skip the escaped character
        else if (c == '{' || c == '[') deepest = std::max(deepest, ++depth), values++;
        else if (c == '}' || c == ']') depth--;
        else if (c == ',') values++;
        else if (c == ':') names++;
    }
    *why = deepest > MAX_DEPTH    ? concat("is nested more than ", MAX_DEPTH, " levels deep")
           : values > max_values ? concat("has more than ", max_values, " values") : "";
    if (!why->empty()) return {};
    // The library takes a zero byte for the end of the text.
    const bool zero = bytes && std::memchr(text, 0, size_t(bytes));
    nlohmann::json value;
    if (!zero) value = nlohmann::json::parse(text, text + bytes, nullptr, /*allow_exceptions=*/false);
    if (!value.is_object()) *why = "is not a JSON object";
    // Parsers differ on which of two equal names counts.
    else if (names_in(value) != names) *why = "has a name twice in one object";
    return value;
}

std::string Fields::excerpt(const nlohmann::json& value) { return escaped(value.dump()); }

Fields read_json(const std::string& path) {
    const MappedFile file(path);
    std::string why;
    nlohmann::json value = parse_json(file.data(), file.bytes(), &why);
    if (!why.empty()) throw Error(path, " ", why, "; download or save it again.");
    return {path, std::move(value)};
}

void write_json(const std::string& path, const nlohmann::ordered_json& value) {
    write_file(path, value.dump(2) + "\n");
}

}  // namespace coat

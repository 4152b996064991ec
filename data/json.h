// data/json.h - JSON files: parsed within limits, and their fields checked.
//
// config.json, an index of shards, a vocabulary or the header of a safetensors file may come from anywhere.
// What is wrong in one is an Error that names the file and the field.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

#include "file.h"

namespace coat {

// What a text contains if it is valid JSON, without parsing it.
struct JsonCounts {
    int depth = 0, deepest = 0;
    int64_t values = 1, names = 0;

    JsonCounts(const char* text, int64_t bytes) {
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
    }
};

// The names in all objects of a value. An object has each name once, so there are fewer than in the text if
// one of them stands there twice.
inline int64_t names_in(const nlohmann::json& value) {
    if (!value.is_structured()) return 0;
    int64_t names = value.is_object() ? int64_t(value.size()) : 0;
    for (const nlohmann::json& inner : value) names += names_in(inner);
    return names;
}

// The JSON object in a text. The JSON library parses nested values iteratively, but prints, copies and
// compares them recursively, and its objects take many times the memory of the text. So depth and number of
// values are limited before it parses. (Its own callbacks take quadratic time.) On success *why is empty;
// otherwise it says what is wrong ("is not a JSON object").
inline nlohmann::json parse_json(const void* data, int64_t bytes, std::string* why,
                                 int64_t max_values = 5'000'000) {
    constexpr int MAX_DEPTH = 32;
    const char* text = static_cast<const char*>(data);
    const JsonCounts counts(text, bytes);
    why->clear();
    if (counts.deepest > MAX_DEPTH) *why = "is nested more than 32 levels deep";
    else if (counts.values > max_values) *why = "has more than " + std::to_string(max_values) + " values";
    if (!why->empty()) return {};
    // The library takes a zero byte for the end of the text.
    const bool zero = bytes && std::memchr(text, 0, size_t(bytes));
    nlohmann::json value;
    if (!zero) value = nlohmann::json::parse(text, text + bytes, nullptr, /*allow_exceptions=*/false);
    if (!value.is_object()) *why = "is not a JSON object";
    // Parsers differ on which of two equal names counts.
    else if (names_in(value) != counts.names) *why = "has a name twice in one object";
    return value;
}

// The fields of one JSON object. A field that is null counts as missing, as in Hugging Face's config.json.
struct Fields {
    std::string path;  // of the file, for errors
    nlohmann::json object;

    [[noreturn]] void reject(const std::string& field, const std::string& what) const {
        throw Error(path + ": field " + field + " " + what + ".");
    }
    static std::string excerpt(const nlohmann::json& value) { return escaped(value.dump()); }
    bool has(const std::string& field) const { return object.contains(field) && !object[field].is_null(); }
    const nlohmann::json& at(const std::string& field) const {
        if (!has(field)) reject(field, "is missing; download or save the folder again");
        return object[field];
    }
    // The field's value as a T, which `ok` accepts; `kind` says what it accepts.
    template <class T, class Accept>
    T value(const std::string& field, const char* kind, Accept ok) const {
        const nlohmann::json& found = at(field);
        if (!ok(found))
            reject(field, std::string("must be ") + kind + ", not " + excerpt(found) + "; correct it");
        return found.get<T>();
    }
    // At most 10^15, far below 2^63: sums do not overflow.
    static bool is_natural(const nlohmann::json& x) {
        return x.is_number_unsigned() && x.get<uint64_t>() <= 1'000'000'000'000'000;
    }
    int64_t natural(const std::string& field) const {
        return value<int64_t>(field, "a whole number up to 10^15", is_natural);
    }
    std::vector<int64_t> naturals(const std::string& field) const {
        auto ok = [](const nlohmann::json& x) {
            return x.is_array() && std::all_of(x.begin(), x.end(), is_natural);
        };
        return value<std::vector<int64_t>>(field, "a list of whole numbers up to 10^15", ok);
    }
    int64_t natural(const std::string& field, int64_t otherwise) const {
        return has(field) ? natural(field) : otherwise;
    }
    float positive(const std::string& field) const {
        return value<float>(field, "a positive number", [](const nlohmann::json& x) {
            return x.is_number() && x.get<float>() > 0 && std::isfinite(x.get<float>());
        });
    }
    float positive(const std::string& field, float otherwise) const {
        return has(field) ? positive(field) : otherwise;
    }
    bool boolean(const std::string& field, bool otherwise) const {
        auto ok = [](const nlohmann::json& x) { return x.is_boolean(); };
        return has(field) ? value<bool>(field, "a boolean", ok) : otherwise;
    }
    std::string text(const std::string& field) const {
        return value<std::string>(field, "text", [](const nlohmann::json& x) { return x.is_string(); });
    }
    // The object in this field; one without fields if it is missing.
    Fields inner(const std::string& field) const {
        auto ok = [](const nlohmann::json& x) { return x.is_object(); };
        return {path, has(field) ? value<nlohmann::json>(field, "an object", ok) : nlohmann::json::object()};
    }
};

inline Fields read_json(const std::string& path) {
    const MappedFile file(path);
    std::string why;
    nlohmann::json value = parse_json(file.data(), file.bytes(), &why);
    if (!why.empty()) throw Error(path + " " + why + "; download or save it again.");
    return {path, std::move(value)};
}

inline void write_json(const std::string& path, const nlohmann::ordered_json& value) {
    write_file(path, value.dump(2) + "\n");
}

}  // namespace coat

//! Writes objects as YAML that parsers of YAML 1.1 and 1.2 read alike: kubectl takes `off`, which a
//! writer of 1.2 does not quote, for a boolean.

use serde_json::Value;

/// Words that are no text in YAML 1.1.
const RESERVED: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

/// YAML documents, the same bytes for the same objects.
pub fn write(objects: &[Value]) -> String {
    let document = |object| {
        let mut text = String::new();
        block(object, "\n", &mut text);
        text.trim_start().to_owned() + "\n"
    };
    let documents: Vec<String> = objects.iter().map(document).collect();
    documents.join("---\n")
}

/// Writes a value behind its key or hyphen. `line` is the break with the indentation of its lines.
fn block(value: &Value, line: &str, text: &mut String) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                *text += &format!("{line}{}:", scalar(&Value::from(&**name)));
                block(value, &format!("{line}  "), text);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                let mut inner = String::new();
                block(item, &format!("{line}  "), &mut inner);
                // The first field is behind the hyphen.
                *text += &format!("{line}- {}", inner.trim_start());
            }
        }
        other => *text += &format!(" {}", scalar(other)),
    }
}

/// A scalar as JSON, which is YAML, or a text without quotes if it cannot be anything else.
fn scalar(value: &Value) -> String {
    let is_plain = |text: &&str| {
        let is_safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '/');
        text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(is_safe)
            && !RESERVED.contains(&&*text.to_ascii_lowercase())
    };
    let plain = value.as_str().filter(is_plain);
    plain.map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use diy_mesh_sandbox::manifest;
    use serde_json::json;

    use super::*;

    #[test]
    fn nested_values_are_read_back() {
        let object = json!({"apiVersion": "v1", "kind": "A", "b": [[1, [2]], {"c": {"d": [], "e": {}}, "f": null}],
            "g: h": "i: j\nk", "l": "# m", "n": ["off", "No", "1e3", "1_0", "2026-01-01", "", "-", "{{ o }}"]});
        let text = write(&[object.clone(), object.clone()]);
        assert_eq!(
            manifest::parse(&text).unwrap(),
            [&object, &object].map(Clone::clone)
        );
        for line in [
            "  - \"off\"\n",
            "  - \"No\"\n",
            "\n\"n\":\n",
            "  - \"1_0\"\n",
            "kind: A\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in {text}");
        }
    }
}

//! Reads JSON with one deserializer, of texts: each further one is compiled once more for each type.
//! An error names the field. Pure.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A field that cannot be read.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{}{reason}", if .path.is_empty() { String::new() } else { format!("{path}: ") })]
pub struct Error {
    /// The path of the field. Empty: the whole value.
    path: String,
    reason: String,
}

/// Reads a text in one line.
pub fn parse<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, Error> {
    serde_json::from_str(json).map_err(|error| Error {
        path: path_at(json, error.column()),
        reason: reason(&error),
    })
}

/// Reads a value, by its text.
pub fn read<T: DeserializeOwned>(value: &Value) -> Result<T, Error> {
    parse(&value.to_string())
}

/// The message of an error, without the position in the text, which nobody has written.
pub fn reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let reason = message.strip_suffix(&position).unwrap_or(&message);
    reason.to_owned()
}

/// The path of the field that the first bytes of a JSON text end in.
pub fn path_at(json: &str, length: usize) -> String {
    enum Inside {
        Object(String),
        List(usize),
    }
    let bytes = &json.as_bytes()[..json.len().min(length)];
    let (mut open, mut at, mut is_name) = (Vec::new(), 0, false);
    while let Some(byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'{' => {
                open.push(Inside::Object(String::new()));
                is_name = true;
            }
            b'[' => open.push(Inside::List(0)),
            b'}' | b']' => {
                open.pop();
            }
            b',' => match open.last_mut() {
                Some(Inside::List(position)) => *position += 1,
                _ => is_name = true,
            },
            b'"' => {
                let start = at;
                while let Some(byte) = bytes.get(at).filter(|byte| **byte != b'"') {
                    at += 1 + usize::from(*byte == b'\\');
                }
                if let (true, Some(Inside::Object(name))) = (is_name, open.last_mut()) {
                    *name = String::from_utf8_lossy(&bytes[start..at.min(bytes.len())]).into();
                    is_name = false;
                }
                at += 1;
            }
            _ => {}
        }
    }
    let mut path = String::new();
    for inside in open {
        match inside {
            Inside::Object(name) if path.is_empty() => path = name,
            Inside::Object(name) => path += &format!(".{name}"),
            Inside::List(position) => path += &format!("[{position}]"),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn error_names_the_field_and_not_the_position() {
        #[derive(Debug, PartialEq, Deserialize)]
        struct Spec {
            ports: Vec<u16>,
        }
        let error = read::<Spec>(&json!({"ports": [80, "http"]})).unwrap_err();
        let expected = "ports[1]: invalid type: string \"http\", expected u16";
        assert_eq!(error.to_string(), expected);
        let error = read::<Spec>(&json!(1)).unwrap_err().to_string();
        assert_eq!(error, "invalid type: integer `1`, expected struct Spec");
        let ports = vec![80];
        assert_eq!(read(&json!({"ports": ports})), Ok(Spec { ports }));
    }

    #[test]
    fn position_in_json_has_the_path_of_the_innermost_field() {
        let json = r#"{"a":{"b\"}":[{"c":"x,{"},{"d":[1,2]}],"e":null},"f":"#;
        for (before, path) in [
            ("", ""),
            (r#"{"a""#, "a"),
            (r#""c":"#, r#"a.b\"}[0].c"#),
            (r#""x,{"#, r#"a.b\"}[0].c"#),
            (r#"{"d":[1,"#, r#"a.b\"}[1].d[1]"#),
            ("[1,2]}", r#"a.b\"}[1]"#),
            (r#""e":null"#, "a.e"),
            (r#""f":"#, "f"),
        ] {
            let length = json.find(before).unwrap() + before.len();
            assert_eq!(path_at(json, length), path, "{before}");
        }
        assert_eq!(path_at(json, usize::MAX), "f");
    }
}

//! Changes of header fields that routes ask for, validated. Pure.

use diy_mesh_proto::field::is_reserved;
use http::{HeaderName, HeaderValue};

/// A change of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldEdit {
    /// The field has this value alone.
    Set(String, String),
    /// The field has this value besides those that it has.
    Add(String, String),
    /// The field is removed.
    Remove(String),
}

impl FieldEdit {
    /// A field that has this value alone.
    pub fn set(name: &str, value: &str) -> Result<Self, String> {
        check(name)?;
        check_value(name, value)?;
        Ok(Self::Set(name.to_owned(), value.to_owned()))
    }

    /// A further value.
    pub fn add(name: &str, value: &str) -> Result<Self, String> {
        check(name)?;
        check_value(name, value)?;
        Ok(Self::Add(name.to_owned(), value.to_owned()))
    }

    /// A field that is removed.
    pub fn remove(name: &str) -> Result<Self, String> {
        check(name)?;
        Ok(Self::Remove(name.to_owned()))
    }

    /// Whether fields with this name lose the values that they have.
    pub(super) fn removes(&self, name: &[u8]) -> bool {
        !matches!(self, Self::Add(..)) && name.eq_ignore_ascii_case(self.name().as_bytes())
    }

    /// The field that is appended.
    pub(super) fn appended(&self) -> Option<(&str, &str)> {
        match self {
            Self::Set(name, value) | Self::Add(name, value) => Some((name, value)),
            Self::Remove(_) => None,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Set(name, _) | Self::Add(name, _) | Self::Remove(name) => name,
        }
    }

    /// Appends a change, which takes effect after the others.
    pub fn push(self, to: &mut Vec<Self>) {
        to.retain(|earlier| !self.removes(earlier.name().as_bytes()));
        to.push(self);
    }
}

fn check(name: &str) -> Result<(), String> {
    if HeaderName::from_bytes(name.as_bytes()).is_err() {
        return Err(format!("header {name:?}: expected the name of a field"));
    }
    if is_reserved(name) {
        return Err(format!(
            "header {name:?}: routes must not change this field"
        ));
    }
    Ok(())
}

fn check_value(name: &str, value: &str) -> Result<(), String> {
    match HeaderValue::from_str(value) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!(
            "header {name:?}: the value {value:?} has control characters"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_fields_of_the_mesh_and_of_connections_and_line_ends() {
        for name in [
            "X-Called-By",
            "X-Mesh-Previous-Attempts",
            "x_called.by",
            "X-Mesh-Error",
            "Connection",
            "TE",
            "Host",
            "Transfer-Encoding",
            "Content-Length",
            "",
            "a b",
            "a:b",
            "a\r\nb",
        ] {
            assert!(FieldEdit::remove(name).is_err(), "{name:?}");
            assert!(FieldEdit::set(name, "1").is_err(), "{name:?}");
        }
        for value in ["a\r\nX-Called-By: b", "a\n", "\0"] {
            assert!(FieldEdit::add("x-a", value).is_err(), "{value:?}");
        }
        assert!(FieldEdit::set("X-Route", "canary, 10%").is_ok());
    }

    #[test]
    fn later_changes_of_a_field_replace_earlier_ones() {
        let mut edits = Vec::new();
        for edit in [
            FieldEdit::set("x-a", "1"),
            FieldEdit::add("X-A", "2"),
            FieldEdit::remove("x-a"),
            FieldEdit::add("x-a", "3"),
            FieldEdit::set("x-b", "4"),
        ] {
            edit.unwrap().push(&mut edits);
        }
        let expected = [
            FieldEdit::Remove("x-a".into()),
            FieldEdit::Add("x-a".into(), "3".into()),
            FieldEdit::Set("x-b".into(), "4".into()),
        ];
        assert_eq!(edits, expected);
    }
}

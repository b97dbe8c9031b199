//! Changes of header fields that routes ask for. Pure. Names and values have been checked.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_changes_of_a_field_replace_earlier_ones() {
        let mut edits = Vec::new();
        for edit in [
            FieldEdit::Set("x-a".into(), "1".into()),
            FieldEdit::Add("X-A".into(), "2".into()),
            FieldEdit::Remove("x-a".into()),
            FieldEdit::Add("x-a".into(), "3".into()),
            FieldEdit::Set("x-b".into(), "4".into()),
        ] {
            edit.push(&mut edits);
        }
        let expected = [
            FieldEdit::Remove("x-a".into()),
            FieldEdit::Add("x-a".into(), "3".into()),
            FieldEdit::Set("x-b".into(), "4".into()),
        ];
        assert_eq!(edits, expected);
    }
}

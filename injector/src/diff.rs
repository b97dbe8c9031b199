//! Merge and comparison of JSON documents, for injection into pods. Pure.

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation};
use serde_json::Value;

/// Merges `new` into `base`: maps by field, lists of named objects by name; other values are
/// replaced. Idempotent.
pub fn merge(base: &mut Value, new: &Value) {
    match (base, new) {
        (Value::Object(base), Value::Object(new)) => {
            for (field, value) in new {
                merge(base.entry(field.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(base), Value::Array(new)) if let Some(key) = merge_key(new) => {
            merge_list(base, new, key)
        }
        (base, new) => *base = new.clone(),
    }
}

/// Replaces the first item with the key of each new item, or appends it. Removes further items with
/// that key.
pub fn merge_list(base: &mut Vec<Value>, new: &[Value], key: &str) {
    for item in new {
        let mut is_present = false;
        base.retain_mut(|other| {
            if other.get(key) != item.get(key) {
                return true;
            }
            other.clone_from(item);
            !std::mem::replace(&mut is_present, true)
        });
        if !is_present {
            base.push(item.clone());
        }
    }
}

/// The field that identifies the items of a list, if all items have it. Kubernetes merges its lists
/// by the same fields.
fn merge_key(items: &[Value]) -> Option<&'static str> {
    ["mountPath", "name"]
        .into_iter()
        .find(|key| items.iter().all(|item| item.get(key).is_some()))
}

/// The JSON patch from one pod to another. Compares annotations, resources, containers, init
/// containers and volumes only.
pub fn patch(before: &Value, after: &Value) -> Patch {
    let mut patch = Vec::new();
    match (
        before.pointer("/metadata/annotations"),
        after.pointer("/metadata/annotations"),
    ) {
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let changed = new
                .iter()
                .filter(|(name, value)| old.get(*name) != Some(value));
            patch
                .extend(changed.map(|(name, value)| add(["metadata", "annotations", name], value)));
        }
        (_, new) => patch.extend(new.map(|new| add(["metadata", "annotations"], new))),
    }
    let resources = |pod: &Value| pod.pointer("/spec/resources").cloned();
    if let (before, Some(after)) = (resources(before), resources(after))
        && before.as_ref() != Some(&after)
    {
        patch.push(add(["spec", "resources"], &after));
    }
    for list in ["initContainers", "containers", "volumes"] {
        let path = format!("/spec/{list}");
        match (before.pointer(&path), after.pointer(&path)) {
            (Some(Value::Array(old)), Some(Value::Array(new))) => {
                list_operations(list, old, new, &mut patch)
            }
            (_, new) => patch.extend(new.map(|new| add(["spec", list], new))),
        }
    }
    Patch(patch)
}

/// Replaces the items between the common prefix and the common suffix of two lists.
fn list_operations(list: &str, old: &[Value], new: &[Value], patch: &mut Vec<PatchOperation>) {
    let is_equal = |(old, new): &(&Value, &Value)| old == new;
    let prefix = old.iter().zip(new).take_while(is_equal).count();
    let (old, new) = (&old[prefix..], &new[prefix..]);
    let suffix = old
        .iter()
        .rev()
        .zip(new.iter().rev())
        .take_while(is_equal)
        .count();
    let remove = RemoveOperation {
        path: pointer(["spec", list, &prefix.to_string()]),
    };
    let removed = old.len() - suffix;
    patch.extend(std::iter::repeat_n(PatchOperation::Remove(remove), removed));
    for (offset, item) in new[..new.len() - suffix].iter().enumerate() {
        patch.push(add(["spec", list, &(prefix + offset).to_string()], item));
    }
}

fn add<const N: usize>(path: [&str; N], value: &Value) -> PatchOperation {
    PatchOperation::Add(AddOperation {
        path: pointer(path),
        value: value.clone(),
    })
}

fn pointer<const N: usize>(path: [&str; N]) -> PointerBuf {
    PointerBuf::from_tokens(path)
}

//! Evaluation of webhook match conditions: CEL expressions over the admitted `object`. Pure.

use std::{sync::Arc, thread};

use anyhow::{Context as _, Result, bail, ensure};
use cel::{Context, Env, Value, extensions};

const MAX_BRACKETS: usize = 64;
/// Unoptimized, the parser needs about 170 kB of stack for each nested bracket.
const STACK_SIZE: usize = 32 << 20;

/// Evaluates a match condition. Fails if the expression does not compile, refers to something other
/// than `object`, or does not return a boolean.
pub(super) fn evaluate(expression: &str, object: &serde_json::Value) -> Result<bool> {
    let brackets = expression.matches(['(', '[', '{']).count();
    ensure!(
        brackets <= MAX_BRACKETS,
        "expression has {brackets} brackets, the sandbox supports at most {MAX_BRACKETS}"
    );
    thread::scope(|scope| {
        thread::Builder::new()
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, || execute(expression, object))?
            .join()
            .expect("the evaluation does not panic")
    })
}

fn execute(expression: &str, object: &serde_json::Value) -> Result<bool> {
    let mut env = Env::stdlib();
    env.add_extension(extensions::strings)?;
    let env = Arc::new(env);
    let program = env.compile(expression)?;
    let mut context = Context::with_env(env);
    context
        .add_variable("object", object)
        .context("failed to convert the object to a CEL value")?;
    match program.execute(&context)? {
        Value::Bool(value) => Ok(value),
        other => bail!("expression returned {:?}, expected bool", other.type_of()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn evaluate(expression: &str) -> Result<bool> {
        let object = json!({"metadata": {"name": "a", "annotations": {"x/y": "True"}}, "spec": {"hostNetwork": false, "list": ["p", "q"]}});
        super::evaluate(expression, &object)
    }

    #[test]
    fn evaluates_match_conditions() {
        for (expression, expected) in [
            (
                "has(object.metadata.annotations) && 'x/y' in object.metadata.annotations",
                true,
            ),
            (
                "object.metadata.annotations['x/y'].lowerAscii() == 'true'",
                true,
            ),
            (
                "has(object.metadata.labels) && object.metadata.labels['a'] == 'b'",
                false,
            ),
            (
                "!(has(object.spec.hostNetwork) && object.spec.hostNetwork)",
                true,
            ),
            ("object.metadata.name == \"a\" ? false : true", false),
            (
                "object.metadata.name != 'a' || 'q' in object.spec.list",
                true,
            ),
            (
                "'a' in ['a', 'b'] && object.spec.list[1] == 'q' && size(object.spec.list) == 2",
                true,
            ),
            (
                "object.metadata.name.startsWith('a') && !object.metadata.name.contains('b')",
                true,
            ),
        ] {
            assert_eq!(evaluate(expression).unwrap(), expected, "{expression}");
        }
    }

    #[test]
    fn logical_operators_absorb_errors_of_the_other_operand() {
        assert!(!evaluate("object.nothing == 'x' && false").unwrap());
        assert!(evaluate("true || object.nothing == 'x'").unwrap());
        let error = evaluate("object.nothing == 'x' && true").unwrap_err();
        assert!(error.to_string().contains("nothing"), "{error}");
    }

    #[test]
    fn rejects_invalid_expressions() {
        for (expression, word) in [
            ("request.name == 'x'", "request"),
            ("object.metadata.name.unknown('a')", "unknown"),
            ("object.metadata.name", "expected bool"),
            ("true true", "true"),
            ("(true", "missing"),
        ] {
            let error = format!("{:#}", evaluate(expression).unwrap_err());
            assert!(error.contains(word), "{expression}: {error}");
        }
    }

    #[test]
    fn rejects_deeply_nested_expressions() {
        for bracket in ["(", "[", "{", "size("] {
            for depth in [MAX_BRACKETS, 100_000] {
                assert!(evaluate(&bracket.repeat(depth)).is_err());
            }
        }
        assert!(evaluate(&"!".repeat(1_000)).is_err());
    }
}

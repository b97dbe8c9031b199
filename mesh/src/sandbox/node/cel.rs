//! The part of CEL that webhooks' match conditions are usually written in, evaluated over a JSON object: `?:`, `||`, `&&`,
//! `==`, `!=`, `in`, `!`, fields, indexes, strings, numbers, booleans, lists, `has()`, and the string functions lowerAscii,
//! upperAscii, startsWith, endsWith, contains and size. What is not known is an error that names it, never a guess. Pure.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

/// Evaluates a condition; `object` is what the expression calls so.
pub(super) fn holds(expression: &str, object: &Value) -> Result<bool> {
    let tokens = tokens(expression)?;
    let mut parser = Parser {
        tokens: &tokens,
        at: 0,
        object,
        depth: 0,
    };
    let value = parser.conditional()?;
    ensure!(parser.at == tokens.len(), "unexpected {}", parser.shown());
    value?.as_bool().context("the expression is no condition")
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    Literal(Value),
    Sign(&'static str),
}

/// What an expression is worth. Its error is a value like any other: `false && error` is false, as `true || error` is true.
type Outcome = Result<Value>;

const SIGNS: [&str; 16] = [
    "||", "&&", "==", "!=", "?", ":", "!", "(", ")", "[", "]", ".", ",", "{", "}", "-",
];
/// Nobody writes conditions as deep; a stack has an end.
const DEEPEST: usize = 64;

fn tokens(text: &str) -> Result<Vec<Token>> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let used = if first == '\'' || first == '"' {
            let end = rest[1..].find(first).context("a string without an end")? + 1;
            ensure!(
                !rest[1..end].contains('\\'),
                "the sandbox does not know escapes in strings: {}",
                &rest[..=end]
            );
            tokens.push(Token::Literal(rest[1..end].into()));
            end + 1
        } else if first.is_ascii_digit() {
            let end = rest
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(rest.len());
            tokens.push(Token::Literal(rest[..end].parse::<i64>()?.into()));
            end
        } else if first.is_alphabetic() || first == '_' {
            let end = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            tokens.push(match &rest[..end] {
                "true" => Token::Literal(true.into()),
                "false" => Token::Literal(false.into()),
                "null" => Token::Literal(Value::Null),
                name => Token::Name(name.into()),
            });
            end
        } else {
            let sign = SIGNS
                .into_iter()
                .find(|sign| rest.starts_with(sign))
                .with_context(|| format!("the sandbox does not know {first:?}"))?;
            tokens.push(Token::Sign(sign));
            sign.len()
        };
        rest = rest[used..].trim_start();
    }
    Ok(tokens)
}

/// Reads and evaluates in one. The outer `Result` is about the text, the inner one about the values.
struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    object: &'a Value,
    depth: usize,
}

impl Parser<'_> {
    fn conditional(&mut self) -> Result<Outcome> {
        self.depth += 1;
        ensure!(self.depth <= DEEPEST, "the expression is nested too deeply");
        let condition = self.or()?;
        let outcome = if self.take("?") {
            let yes = self.conditional()?;
            self.expect(":")?;
            let no = self.conditional()?;
            match condition.and_then(boolean) {
                Ok(true) => yes,
                Ok(false) => no,
                Err(error) => Err(error),
            }
        } else {
            condition
        };
        self.depth -= 1;
        Ok(outcome)
    }

    fn or(&mut self) -> Result<Outcome> {
        let mut left = self.and()?;
        while self.take("||") {
            left = either(left, self.and()?, true);
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Outcome> {
        let mut left = self.comparison()?;
        while self.take("&&") {
            left = either(left, self.comparison()?, false);
        }
        Ok(left)
    }

    fn comparison(&mut self) -> Result<Outcome> {
        let left = self.unary()?;
        let sign = ["==", "!="].into_iter().find(|sign| self.take(sign));
        let named = sign.is_none() && self.tokens.get(self.at) == Some(&Token::Name("in".into()));
        if sign.is_none() && !named {
            return Ok(left);
        }
        self.at += usize::from(named);
        let right = self.unary()?;
        Ok((|| {
            let (left, right) = (left?, right?);
            Ok(match (sign, &right) {
                (Some("=="), _) => left == right,
                (Some(_), _) => left != right,
                (None, Value::Object(map)) => {
                    map.contains_key(left.as_str().context("a key is a string")?)
                }
                (None, Value::Array(list)) => list.contains(&left),
                (None, _) => bail!("`in` needs a map or a list"),
            }
            .into())
        })())
    }

    fn unary(&mut self) -> Result<Outcome> {
        self.depth += 1;
        ensure!(self.depth <= DEEPEST, "the expression is nested too deeply");
        let outcome = if self.take("!") {
            self.unary()?.and_then(boolean).map(|value| json!(!value))
        } else {
            self.member()?
        };
        self.depth -= 1;
        Ok(outcome)
    }

    fn member(&mut self) -> Result<Outcome> {
        let mut value = self.primary()?;
        loop {
            if self.take(".") {
                let Some(Token::Name(name)) = self.tokens.get(self.at).cloned() else {
                    bail!("a name is missing after the dot")
                };
                self.at += 1;
                value = if self.take("(") {
                    let arguments = self.list(")")?;
                    value.and_then(|value| method(&value, &name, &arguments?))
                } else {
                    value.and_then(|value| field(&value, &name))
                };
            } else if self.take("[") {
                let index = self.conditional()?;
                self.expect("]")?;
                value = value.and_then(|value| match index? {
                    Value::String(key) => field(&value, &key),
                    Value::Number(number) => {
                        let at = number.as_u64().and_then(|at| usize::try_from(at).ok());
                        at.and_then(|at| value.get(at))
                            .cloned()
                            .with_context(|| format!("no such index: {number}"))
                    }
                    other => bail!("{other} is no index"),
                });
            } else {
                return Ok(value);
            }
        }
    }

    fn primary(&mut self) -> Result<Outcome> {
        let token = self
            .tokens
            .get(self.at)
            .cloned()
            .context("the expression ends too early")?;
        self.at += 1;
        match token {
            Token::Literal(value) => Ok(Ok(value)),
            Token::Sign("(") => {
                let value = self.conditional()?;
                self.expect(")")?;
                Ok(value)
            }
            Token::Sign("[") => Ok(self.list("]")?.map(Value::Array)),
            Token::Name(name) if name == "object" => Ok(Ok(self.object.clone())),
            Token::Name(name) if name == "has" => {
                self.expect("(")?;
                let start = self.at;
                let value = self.member()?;
                ensure!(
                    matches!(self.tokens.get(self.at - 1), Some(Token::Name(_)))
                        && self.at > start + 2,
                    "has() takes a field"
                );
                self.expect(")")?;
                Ok(Ok(value.is_ok().into()))
            }
            Token::Name(name) if name == "size" => {
                self.expect("(")?;
                let arguments = self.list(")")?;
                Ok(arguments.and_then(|list| size(list.first().context("size() takes a value")?)))
            }
            Token::Name(name) => bail!("the sandbox does not know {name}"),
            Token::Sign(sign) => bail!("unexpected {sign}"),
        }
    }

    fn list(&mut self, end: &'static str) -> Result<Result<Vec<Value>>> {
        let mut values = Vec::new();
        while !self.take(end) {
            values.push(self.conditional()?);
            if !self.take(",") {
                self.expect(end)?;
                break;
            }
        }
        Ok(values.into_iter().collect())
    }

    fn take(&mut self, sign: &str) -> bool {
        let there = matches!(self.tokens.get(self.at), Some(Token::Sign(next)) if *next == sign);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, sign: &'static str) -> Result<()> {
        ensure!(self.take(sign), "{sign} is missing before {}", self.shown());
        Ok(())
    }

    fn shown(&self) -> String {
        self.tokens
            .get(self.at)
            .map_or("the end".into(), |token| format!("{token:?}"))
    }
}

/// `||` and `&&`: whichever side `decides` is enough, whatever the other is.
fn either(left: Outcome, right: Outcome, decides: bool) -> Outcome {
    match (left.and_then(boolean), right.and_then(boolean)) {
        (Ok(value), _) | (_, Ok(value)) if value == decides => Ok(decides.into()),
        (Ok(_), Ok(_)) => Ok((!decides).into()),
        (Err(error), _) | (_, Err(error)) => Err(error),
    }
}

fn boolean(value: Value) -> Result<bool> {
    value
        .as_bool()
        .with_context(|| format!("{value} is neither true nor false"))
}

fn field(value: &Value, name: &str) -> Outcome {
    let none = Map::new();
    value
        .as_object()
        .unwrap_or(&none)
        .get(name)
        .cloned()
        .with_context(|| format!("no such key: {name}"))
}

fn method(value: &Value, name: &str, arguments: &[Value]) -> Outcome {
    if name == "size" {
        return size(value);
    }
    let text = value
        .as_str()
        .with_context(|| format!("{name}() is for strings"))?;
    let argument = || {
        arguments
            .first()
            .and_then(Value::as_str)
            .with_context(|| format!("{name}() takes a string"))
    };
    Ok(match name {
        "lowerAscii" => text.to_ascii_lowercase().into(),
        "upperAscii" => text.to_ascii_uppercase().into(),
        "startsWith" => text.starts_with(argument()?).into(),
        "endsWith" => text.ends_with(argument()?).into(),
        "contains" => text.contains(argument()?).into(),
        _ => bail!("the sandbox does not know {name}()"),
    })
}

fn size(value: &Value) -> Outcome {
    Ok(match value {
        Value::String(text) => text.chars().count(),
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => bail!("{value} has no size"),
    }
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluate(expression: &str) -> Result<bool> {
        let object = json!({"metadata": {"name": "a", "annotations": {"x/y": "True"}}, "spec": {"hostNetwork": false, "list": ["p", "q"]}});
        holds(expression, &object)
    }

    #[test]
    fn what_conditions_are_made_of() {
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
    fn an_error_is_absorbed_where_the_other_side_decides() {
        assert!(!evaluate("object.nothing == 'x' && false").unwrap());
        assert!(evaluate("true || object.nothing == 'x'").unwrap());
        assert!(
            evaluate("object.nothing == 'x' && true")
                .unwrap_err()
                .to_string()
                .contains("nothing")
        );
    }

    #[test]
    fn what_is_not_known_is_named() {
        for (expression, word) in [
            ("request.name == 'x'", "request"),
            ("object.metadata.name.matches('a')", "matches"),
            ("1 + 2 == 3", "'+'"),
            ("object.metadata.name", "no condition"),
            ("true true", "unexpected"),
            ("(true", "missing"),
        ] {
            let error = format!("{:#}", evaluate(expression).unwrap_err());
            assert!(error.contains(word), "{expression}: {error}");
        }
        assert!(evaluate(&"(".repeat(100_000)).is_err());
        assert!(evaluate(&"!".repeat(100_000)).is_err());
    }
}

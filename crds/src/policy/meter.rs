//! Keeps an expression from running away. The interpreter has no limits of its own, so expressions are
//! rewritten when they are compiled (see `cel.rs`): every turn of a loop and everything that builds a value
//! calls one of the functions here, which refuse once the allowance is used up.
//!
//! An allowance belongs to the evaluating thread: the interpreter is synchronous, and its functions have no
//! other way to know which evaluation they serve.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::Instant;

use kube_cel::KubeCelExt;
use kube_cel::cel::extractors::{Arguments, This};
use kube_cel::cel::objects::Value;
use kube_cel::cel::{Context, ExecutionError};
use regex::Regex;

use super::REGEX_TEXT_MAX;

/// Turns of all loops in one evaluation. A policy over 32 filters with 256 variables each needs 8,192.
const TURNS_MAX: u32 = 50_000;

/// Bytes and entries that one evaluation may build. An object has at most 1.5 MiB, the limit of etcd.
const BUILT_MAX: usize = 4 * 1024 * 1024;

/// Entries in a list for functions that compare each entry with each.
const PAIRED_MAX: usize = 1_000;

/// Digits of a precision in `format`: 99 digits are more than a double has.
const PRECISION_DIGITS: usize = 2;

/// Regular expressions that are kept. Almost all patterns are literals, and policies have few of them.
const REGEXES_KEPT: usize = 256;

/// Called before each turn of a loop, with the loop's own condition.
pub(super) const TURN: &str = "@turn";
/// Called with every built value: lists, maps, sums and results of functions.
pub(super) const BUILT: &str = "@built";
/// Called with the arguments of a function that would compare each entry with each.
pub(super) const PAIRED: &str = "@paired";

/// Functions whose result is always small, so that it need not be measured.
pub(super) const SMALL_RESULT: &[&str] = &[
    "size",
    "contains",
    "startsWith",
    "endsWith",
    "matches",
    "int",
    "uint",
    "double",
    "bool",
    "duration",
    "timestamp",
    "indexOf",
    "lastIndexOf",
    "isSorted",
    "isURL",
    "isIP",
    "isCIDR",
    "isQuantity",
    "isSemver",
    "quantity",
    "url",
    "ip",
    "cidr",
    "semver",
    "isGreaterThan",
    "isLessThan",
    "compareTo",
    "getHost",
    "getHostname",
    "getPort",
    "getScheme",
    "containsIP",
    "containsCIDR",
    "hasValue",
    "family",
];

/// Functions that compare each entry with each, or that grow with the product of their arguments.
pub(super) const QUADRATIC: &[&str] = &["distinct", "sets.contains", "sets.equivalent", "sets.intersects"];

thread_local! {
    static ALLOWANCE: Cell<Allowance> = const { Cell::new(Allowance { turns: 0, built: 0, until: None, spent: false }) };
}

#[derive(Clone, Copy)]
struct Allowance {
    turns: u32,
    built: usize,
    until: Option<Instant>,
    spent: bool,
}

impl Allowance {
    fn is_late(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() > until)
    }
}

/// Runs `evaluate` with a fresh allowance; `None` if the allowance was used up, regardless of the result.
pub(super) fn metered<T>(until: Instant, evaluate: impl FnOnce() -> T) -> Option<T> {
    let fresh = Allowance { turns: TURNS_MAX, built: BUILT_MAX, until: Some(until), spent: false };
    ALLOWANCE.set(fresh);
    let result = evaluate();
    (!ALLOWANCE.get().spent).then_some(result)
}

/// The functions of Kubernetes' CEL library, with limits where it has none. Created once, because registering
/// them takes longer than most evaluations.
pub(super) fn library() -> &'static Context<'static> {
    static LIBRARY: LazyLock<Context<'static>> = LazyLock::new(|| {
        let mut library = Context::default().with_all();
        library.add_function(TURN, turn);
        library.add_function(BUILT, built);
        library.add_function(PAIRED, paired);
        library.add_function("matches", matches);
        library.add_function("find", find);
        library.add_function("findAll", find_all);
        library.add_function("indexOf", index_of);
        library.add_function("lastIndexOf", last_index_of);
        library.add_function("replace", replace);
        library.add_function("join", join);
        library.add_function("lists.range", range);
        library
    });
    &LIBRARY
}

fn refuse(mut allowance: Allowance, what: &str) -> ExecutionError {
    allowance.spent = true;
    ALLOWANCE.set(allowance);
    ExecutionError::function_error("policy", what)
}

fn turn(goes_on: Value) -> Result<Value, ExecutionError> {
    let mut allowance = ALLOWANCE.get();
    // Checks the clock once per turn: a turn may clone a whole object, which takes much longer than the
    // check.
    if allowance.turns == 0 || allowance.is_late() || allowance.spent {
        return Err(refuse(allowance, "the expression takes too long"));
    }
    allowance.turns -= 1;
    ALLOWANCE.set(allowance);
    Ok(goes_on)
}

fn built(value: Value) -> Result<Value, ExecutionError> {
    let mut allowance = ALLOWANCE.get();
    match measure(&value, allowance.built) {
        Some(size) if !allowance.is_late() && !allowance.spent => {
            allowance.built -= size;
            ALLOWANCE.set(allowance);
            Ok(value)
        }
        _ => Err(refuse(allowance, "the expression builds too much")),
    }
}

fn spend(size: usize) -> Result<(), ExecutionError> {
    let mut allowance = ALLOWANCE.get();
    match allowance.built.checked_sub(size) {
        Some(left) => {
            allowance.built = left;
            ALLOWANCE.set(allowance);
            Ok(())
        }
        None => Err(refuse(allowance, "the expression builds too much")),
    }
}

fn paired(value: Value) -> Result<Value, ExecutionError> {
    match &value {
        Value::List(list) if list.len() > PAIRED_MAX => {
            Err(refuse(ALLOWANCE.get(), "a list is too long to compare each entry with each"))
        }
        _ => Ok(value),
    }
}

/// The bytes and entries of a value at all levels; `None` as soon as they exceed `most`.
fn measure(value: &Value, most: usize) -> Option<usize> {
    /// The weight of an entry itself: a boxed value and its place in a list or table.
    const ENTRY: usize = 32;
    let within = |size: usize| (size <= most).then_some(size);
    match value {
        Value::String(text) => within(text.len() + ENTRY),
        Value::Bytes(bytes) => within(bytes.len() + ENTRY),
        Value::List(list) => list.iter().try_fold(ENTRY, |sum, entry| {
            let sum = within(sum)?;
            Some(sum + measure(entry, most - sum)?)
        }),
        Value::Map(map) => map.map.iter().try_fold(ENTRY, |sum, (key, entry)| {
            let sum = within(sum + ENTRY + key.to_string().len())?;
            Some(sum + measure(entry, most - sum)?)
        }),
        _ => within(ENTRY),
    }
}

/// A compiled regular expression, kept for the next evaluation, because compiling takes far longer than
/// matching. It is shared and not cloned, because a clone would allocate its working memory again.
pub(super) fn regex(pattern: &str) -> Result<Arc<Regex>, String> {
    static KEPT: LazyLock<RwLock<HashMap<String, Arc<Regex>>>> = LazyLock::new(RwLock::default);
    let found = KEPT.read().unwrap_or_else(PoisonError::into_inner).get(pattern).cloned();
    if let Some(regex) = found {
        return Ok(regex);
    }
    let regex = Arc::new(super::check::compile_regex(pattern)?);
    let mut kept = KEPT.write().unwrap_or_else(PoisonError::into_inner);
    // Patterns that are built from objects could fill the cache.
    if kept.len() >= REGEXES_KEPT {
        kept.clear();
    }
    kept.insert(pattern.to_owned(), Arc::clone(&regex));
    Ok(regex)
}

/// The expression for a search in `text`, if there is time for one.
fn searching(name: &str, text: &str, pattern: &str) -> Result<Arc<Regex>, ExecutionError> {
    if text.len() > REGEX_TEXT_MAX {
        return Err(refuse(ALLOWANCE.get(), "the text is too long for a regular expression"));
    }
    in_time()?;
    regex(pattern).map_err(|error| ExecutionError::function_error(name, error))
}

fn in_time() -> Result<(), ExecutionError> {
    match ALLOWANCE.get() {
        late if late.is_late() => Err(refuse(late, "the expression takes too long")),
        _ => Ok(()),
    }
}

fn matches(This(text): This<Arc<String>>, pattern: Arc<String>) -> Result<Value, ExecutionError> {
    Ok(Value::Bool(searching("matches", &text, &pattern)?.is_match(&text)))
}

fn find(This(text): This<Arc<String>>, pattern: Arc<String>) -> Result<Value, ExecutionError> {
    let found = searching("find", &text, &pattern)?;
    Ok(found.find(&text).map_or("", |found| found.as_str()).into())
}

fn find_all(This(text): This<Arc<String>>, Arguments(args): Arguments) -> Result<Value, ExecutionError> {
    let (pattern, most) = match args.as_slice() {
        [Value::String(pattern)] => (pattern, usize::MAX),
        [Value::String(pattern), Value::Int(most)] => (pattern, usize::try_from(*most).unwrap_or(usize::MAX)),
        _ => {
            return Err(ExecutionError::function_error(
                "findAll",
                "it needs a pattern and, optionally, a limit",
            ));
        }
    };
    let regex = searching("findAll", &text, pattern)?;
    collected(regex.find_iter(&text).take(most).map(|found| found.as_str()))
}

/// Each match may need a search to the end of the text, so one check of the clock is not enough for all of
/// them.
fn collected<'t>(found: impl Iterator<Item = &'t str>) -> Result<Value, ExecutionError> {
    let found = found.map(|found| in_time().map(|()| found.into()));
    Ok(Value::from(found.collect::<Result<Vec<Value>, _>>()?))
}

/// The library's own function compares at every place; this takes time proportional to the sum of both texts,
/// and counts characters as the library does.
fn index_of(This(this): This<Value>, Arguments(args): Arguments) -> Result<Value, ExecutionError> {
    match (&this, args.as_slice()) {
        (Value::String(text), [Value::String(part)]) => Ok(characters_before(text, text.find(part.as_str()))),
        (Value::String(_), [Value::String(part), Value::Int(from)]) if part.is_empty() => {
            Ok(Value::Int(*from))
        }
        (Value::String(text), [Value::String(part), Value::Int(from)]) => {
            let Some(start) = place_of(text, offset("indexOf", *from)?) else { return Ok(Value::Int(-1)) };
            Ok(characters_before(text, text[start..].find(part.as_str()).map(|found| start + found)))
        }
        (Value::List(list), [entry]) => Ok(index(list.iter().position(|other| other == entry))),
        _ => {
            Err(ExecutionError::function_error("indexOf", "it finds a text in a text, or an entry in a list"))
        }
    }
}

fn last_index_of(This(this): This<Value>, Arguments(args): Arguments) -> Result<Value, ExecutionError> {
    match (&this, args.as_slice()) {
        (Value::String(text), [Value::String(part)]) => {
            Ok(characters_before(text, text.rfind(part.as_str())))
        }
        (Value::String(_), [Value::String(part), Value::Int(until)]) if part.is_empty() => {
            Ok(Value::Int(*until))
        }
        (Value::String(text), [Value::String(part), Value::Int(until)]) => {
            let Some(last) = place_of(text, offset("lastIndexOf", *until)?) else {
                return Ok(Value::Int(-1));
            };
            // A match may begin at the last place and extend beyond it.
            let end = text.floor_char_boundary(last.saturating_add(part.len()));
            Ok(characters_before(text, text[..end].rfind(part.as_str())))
        }
        (Value::List(list), [entry]) => Ok(index(list.iter().rposition(|other| other == entry))),
        _ => Err(ExecutionError::function_error(
            "lastIndexOf",
            "it finds a text in a text, or an entry in a list",
        )),
    }
}

fn offset(name: &str, given: i64) -> Result<usize, ExecutionError> {
    let outside = || ExecutionError::function_error(name, format!("index out of range: {given}"));
    usize::try_from(given).map_err(|_negative| outside())
}

/// The byte position of a character; `None` beyond the last one.
fn place_of(text: &str, character: usize) -> Option<usize> {
    text.char_indices().nth(character).map(|(place, _)| place)
}

fn characters_before(text: &str, place: Option<usize>) -> Value {
    index(place.map(|place| text[..place].chars().count()))
}

fn index(found: Option<usize>) -> Value {
    Value::Int(found.and_then(|index| i64::try_from(index).ok()).unwrap_or(-1))
}

fn replace(This(text): This<Arc<String>>, Arguments(args): Arguments) -> Result<Value, ExecutionError> {
    let (old, new, most) = match args.as_slice() {
        [Value::String(old), Value::String(new)] => (old, new, usize::MAX),
        [Value::String(old), Value::String(new), Value::Int(most)] => {
            (old, new, usize::try_from(*most).unwrap_or(usize::MAX))
        }
        _ => {
            return Err(ExecutionError::function_error(
                "replace",
                "it needs two texts and, optionally, a limit",
            ));
        }
    };
    let places = text.matches(old.as_str()).take(most).count();
    spend(places.saturating_mul(new.len()).saturating_add(text.len()))?;
    Ok(text.replacen(old.as_str(), new, most).into())
}

fn join(This(list): This<Arc<Vec<Value>>>, Arguments(args): Arguments) -> Result<Value, ExecutionError> {
    let separator = match args.as_slice() {
        [] => "",
        [Value::String(separator)] => separator.as_str(),
        _ => return Err(ExecutionError::function_error("join", "the separator must be a text")),
    };
    let texts: Option<Vec<&str>> = list
        .iter()
        .map(|entry| match entry {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
        .collect();
    let texts = texts.ok_or_else(|| ExecutionError::function_error("join", "every entry must be a text"))?;
    let size = texts.iter().map(|text| text.len().saturating_add(separator.len())).sum();
    spend(size)?;
    Ok(texts.join(separator).into())
}

fn range(end: i64) -> Result<Value, ExecutionError> {
    let size = usize::try_from(end.max(0)).unwrap_or(usize::MAX);
    spend(size.saturating_mul(32))?;
    Ok(Value::from((0..end.max(0)).map(Value::Int).collect::<Vec<_>>()))
}

/// Whether a literal text, used as the pattern of `format`, asks for an absurd number of digits.
pub(super) fn is_excessive_format(pattern: &str) -> bool {
    pattern
        .split("%.")
        .skip(1)
        .any(|rest| rest.bytes().take_while(u8::is_ascii_digit).count() > PRECISION_DIGITS)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn text(text: &str) -> This<Arc<String>> {
        This(Arc::new(text.to_owned()))
    }

    fn all(pattern: &str) -> Arguments {
        Arguments(Arc::new(vec![Value::from(pattern)]))
    }

    /// Nothing else checks the clock while these run.
    #[test]
    fn every_search_looks_at_the_clock() {
        let (past, future) =
            (Instant::now() - Duration::from_secs(1), Instant::now() + Duration::from_secs(600));
        let searches: [&dyn Fn() -> Result<Value, ExecutionError>; 3] = [
            &|| matches(text("aaa"), Arc::new("a".to_owned())),
            &|| find(text("aaa"), Arc::new("a".to_owned())),
            &|| find_all(text("aaa"), all("a")),
        ];
        for search in searches {
            assert!(metered(future, search).is_some_and(|found| found.is_ok()));
            assert!(metered(past, search).is_none());
        }
    }

    #[test]
    fn a_search_that_finds_much_looks_at_the_clock_for_each_match() {
        let (past, future) =
            (Instant::now() - Duration::from_secs(1), Instant::now() + Duration::from_secs(600));
        let looked_at = Cell::new(0);
        let matches = ["a"; 5].into_iter().inspect(|_| {
            looked_at.set(looked_at.get() + 1);
            if looked_at.get() == 2 {
                ALLOWANCE.set(Allowance { until: Some(past), ..ALLOWANCE.get() });
            }
        });
        assert!(metered(future, || collected(matches)).is_none());
        assert_eq!(looked_at.get(), 2);
    }

    #[test]
    fn a_text_that_is_too_long_for_a_search_is_not_searched() {
        let until = Instant::now() + Duration::from_secs(600);
        let search =
            |length: usize| metered(until, || matches(text(&"a".repeat(length)), Arc::new("a$".to_owned())));
        assert!(search(REGEX_TEXT_MAX).is_some_and(|found| found.is_ok()));
        assert!(search(REGEX_TEXT_MAX + 1).is_none());
    }
}

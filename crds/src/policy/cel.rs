//! CEL expressions: compiled once, with every check that is possible before an object arrives, and then
//! evaluated under a meter. Unknown names are refused at compile time, because an expression that fails on
//! every object would block a whole team.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use kube_cel::cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedEntryExpr, IdedExpr, ListExpr, LiteralValue,
    MapEntryExpr, MapExpr, SelectExpr, operators,
};
use kube_cel::cel::objects::{Key, Value as CelValue};
use kube_cel::cel::parser::Parser;
use kube_cel::cel::{Context, ExecutionError};
use serde_json::Value;
use strum::{Display, EnumIter, EnumString, IntoEnumIterator};

use super::meter::{self, BUILT, PAIRED, QUADRATIC, SMALL_RESULT, TURN};
use super::one_line;
use crate::rules::nearest;

/// The limit of nested brackets. People do not write deeper ones.
const BRACKETS_MAX: u16 = 48;
/// The limit of operators and calls that wait for each other, including the calls that meter them. In a debug
/// build the interpreter needs up to 36 KiB of stack for each, and evaluates on threads with 2 MiB.
const LEVELS_MAX: usize = 40;
/// Nested loops: over filters, over their variables, and over a list to compare with.
const LOOPS_MAX: usize = 3;
/// Expressions are parsed by recursive descent; 4,096 characters need less than this, even in a debug build.
const PARSER_STACK: usize = 64 * 1024 * 1024;
/// The longest `message`.
const MESSAGE_MAX: usize = 1024;
/// The longest expression that the CRD allows.
const LENGTH_MAX: usize = 4096;

/// The variables that an expression can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumIter, EnumString, Display)]
#[strum(serialize_all = "camelCase")]
pub(super) enum Variable {
    Object,
    OldObject,
    Request,
    NamespaceObject,
    Pipeline,
    Usage,
}

/// A compiled expression.
#[derive(Debug)]
pub(crate) struct Expression {
    expression: IdedExpr,
    pub(super) variables: BTreeSet<Variable>,
}

/// Why an expression has no answer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum Failure {
    #[error("it took too long or built too much")]
    Exhausted,
    #[error("it is {0}, not true or false")]
    NotBoolean(&'static str),
    #[error("{0}")]
    Failed(String),
}

impl Expression {
    /// Compiles an expression; the error says what is wrong with it.
    pub(crate) fn compile(source: &str) -> Result<Self, String> {
        if source.len() > LENGTH_MAX {
            return Err(format!("it is {} bytes long, but at most {LENGTH_MAX} are allowed", source.len()));
        }
        // In a separate thread, because a parser that recurses too deeply ends the whole process, not only
        // the request.
        let source = source.to_owned();
        let parse = move || Self::parse(&source);
        let thread = std::thread::Builder::new().stack_size(PARSER_STACK).spawn(parse);
        match thread.map(std::thread::JoinHandle::join) {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_panic)) => Err("the parser cannot read it".to_owned()),
            Err(error) => Err(format!("no thread to compile it: {error}")),
        }
    }

    fn parse(source: &str) -> Result<Self, String> {
        let parser = Parser::new().max_recursion_depth(BRACKETS_MAX);
        let parsed = parser.parse(source).map_err(|error| one_line(&error.to_string()))?;
        let mut rewriter = Rewriter { scope: Vec::new(), loops: 0, variables: BTreeSet::new() };
        let expression = rewriter.rewrite(parsed)?;
        if levels(&expression) > LEVELS_MAX {
            return Err("it is nested too deeply".to_owned());
        }
        Ok(Self { expression, variables: rewriter.variables })
    }

    /// Whether the expression holds.
    pub(super) fn holds(&self, scope: &Context<'_>, until: Instant) -> Result<bool, Failure> {
        match self.value(scope, until)? {
            CelValue::Bool(holds) => Ok(holds),
            other => Err(Failure::NotBoolean(kind_of(&other))),
        }
    }

    /// The text of a message; `None` if the expression fails, or if its result does not fit into a message.
    pub(super) fn text(&self, scope: &Context<'_>, until: Instant) -> Option<String> {
        match self.value(scope, until) {
            Ok(CelValue::String(text)) => Some(text.trim().to_owned())
                .filter(|text| !text.is_empty() && text.len() <= MESSAGE_MAX && !text.contains('\n')),
            _ => None,
        }
    }

    fn value(&self, scope: &Context<'_>, until: Instant) -> Result<CelValue, Failure> {
        let evaluate = || catch_unwind(AssertUnwindSafe(|| scope.resolve(&self.expression)));
        match meter::metered(until, evaluate) {
            None => Err(Failure::Exhausted),
            Some(Ok(Ok(value))) => Ok(value),
            Some(Ok(Err(error))) => Err(Failure::Failed(explain(&error))),
            Some(Err(_panic)) => Err(Failure::Failed("the interpreter failed on it".to_owned())),
        }
    }
}

/// A scope for evaluating expressions: the library, and the requested variables.
pub(super) fn scope<'v>(
    variables: &BTreeSet<Variable>,
    value: impl Fn(Variable) -> Option<&'v Value>,
) -> Context<'static> {
    let mut scope = meter::library().new_inner_scope();
    for variable in variables {
        scope.add_variable_from_value(variable.to_string(), value(*variable).map_or(CelValue::Null, convert));
    }
    scope
}

/// Field names are not changed: people write `object.metadata.namespace`.
fn convert(value: &Value) -> CelValue {
    match value {
        Value::Null => CelValue::Null,
        Value::Bool(value) => CelValue::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => CelValue::Int(number),
            (None, Some(number)) => CelValue::UInt(number),
            (None, None) => CelValue::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => CelValue::from(text.as_str()),
        Value::Array(items) => CelValue::from(items.iter().map(convert).collect::<Vec<_>>()),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| (Key::from(key.as_str()), convert(value)));
            CelValue::from(fields.collect::<std::collections::HashMap<_, _>>())
        }
    }
}

fn kind_of(value: &CelValue) -> &'static str {
    match value {
        CelValue::Null => "null",
        CelValue::String(_) => "a text",
        CelValue::List(_) => "a list",
        CelValue::Map(_) => "a map",
        CelValue::Int(_) | CelValue::UInt(_) | CelValue::Float(_) => "a number",
        _ => "a value",
    }
}

/// Errors of the interpreter repeat the values that they are about, which may be whole objects.
fn explain(error: &ExecutionError) -> String {
    match error {
        ExecutionError::NoSuchKey(key) => {
            format!("there is no field {key:?}; ask with has(…) first if it may be absent")
        }
        ExecutionError::NoSuchOverload => {
            "an operator or function is used on a value of a type that it does not support".to_owned()
        }
        other => one_line(&other.to_string()),
    }
}

/// Checks names and nesting on the way down, and inserts the calls that meter the evaluation.
struct Rewriter {
    scope: Vec<String>,
    loops: usize,
    variables: BTreeSet<Variable>,
}

impl Rewriter {
    fn rewrite(&mut self, expression: IdedExpr) -> Result<IdedExpr, String> {
        let IdedExpr { id, expr } = expression;
        let expr = match expr {
            Expr::Literal(literal) => Expr::Literal(literal),
            Expr::Ident(name) => self.ident(name)?,
            Expr::Select(SelectExpr { operand, field, test: true }) => {
                Expr::Select(SelectExpr { operand: Box::new(self.rewrite(*operand)?), field, test: true })
            }
            Expr::Select(SelectExpr { operand, field, test: false }) => {
                indexed(self.rewrite(*operand)?, field)
            }
            Expr::List(ListExpr { elements, optional_indices }) => {
                let elements = self.all(elements)?;
                built(Expr::List(ListExpr { elements, optional_indices }))
            }
            Expr::Map(MapExpr { entries }) => {
                let entries = entries.into_iter().map(|entry| self.entry(entry)).collect::<Result<_, _>>()?;
                built(Expr::Map(MapExpr { entries }))
            }
            Expr::Call(call) => self.call(call)?,
            Expr::Comprehension(comprehension) => self.comprehension(*comprehension)?,
            Expr::Struct(fields) => {
                return Err(format!("values of type {:?} cannot be created here", fields.type_name));
            }
            Expr::Unspecified => return Err("it is empty".to_owned()),
        };
        Ok(IdedExpr { id, expr })
    }

    fn all(&mut self, expressions: Vec<IdedExpr>) -> Result<Vec<IdedExpr>, String> {
        expressions.into_iter().map(|expression| self.rewrite(expression)).collect()
    }

    fn entry(&mut self, entry: IdedEntryExpr) -> Result<IdedEntryExpr, String> {
        let IdedEntryExpr { id, expr } = entry;
        let EntryExpr::MapEntry(MapEntryExpr { key, value, optional }) = expr else {
            return Err("a map has keys and values".to_owned());
        };
        let (key, value) = (self.rewrite(key)?, self.rewrite(value)?);
        Ok(IdedEntryExpr { id, expr: EntryExpr::MapEntry(MapEntryExpr { key, value, optional }) })
    }

    fn ident(&mut self, name: String) -> Result<Expr, String> {
        if self.scope.contains(&name) {
            return Ok(Expr::Ident(name));
        }
        let known: Vec<String> = Variable::iter().map(|variable| variable.to_string()).collect();
        let Ok(variable) = name.parse::<Variable>() else {
            let near =
                nearest(&name, known.iter().map(String::as_str).chain(self.scope.iter().map(String::as_str)));
            return Err(match near {
                Some(near) => format!("there is no variable {name:?}; did you mean {near}?"),
                None => format!("there is no variable {name:?}; the variables are {}", known.join(", ")),
            });
        };
        self.variables.insert(variable);
        Ok(Expr::Ident(name))
    }

    fn call(&mut self, call: CallExpr) -> Result<Expr, String> {
        let CallExpr { func_name, target, args } = call;
        // `sets.contains(…)`: the target is not a variable, but the first half of the name.
        let namespace = target.as_deref().and_then(|target| match &target.expr {
            Expr::Ident(prefix) if is_known(&format!("{prefix}.{func_name}")) => Some(prefix.clone()),
            _ => None,
        });
        let full =
            namespace.as_ref().map_or_else(|| func_name.clone(), |prefix| format!("{prefix}.{func_name}"));
        if !is_operator(&func_name) && !is_known(&full) {
            return Err(format!("there is no function {full:?}"));
        }
        let appends = func_name == operators::ADD
            && matches!(args.first(), Some(IdedExpr { expr: Expr::Ident(name), .. }) if name.starts_with('@'));
        if func_name == "format" {
            check_format(target.as_deref())?;
        }
        let literal_pattern = matches!(func_name.as_str(), "matches" | "find" | "findAll");
        if let Some(IdedExpr { expr: Expr::Literal(LiteralValue::String(pattern)), .. }) = args.last()
            && literal_pattern
        {
            meter::regex(pattern.inner())?;
        }
        let pairs = QUADRATIC.contains(&full.as_str());
        let wrap = |expression: IdedExpr| {
            if pairs { wrapped(PAIRED, expression) } else { expression }
        };
        let args = self.all(args)?.into_iter().map(wrap).collect();
        let target = match (target, namespace) {
            (Some(target), Some(_)) => Some(target),
            (Some(target), None) => Some(Box::new(wrap(self.rewrite(*target)?))),
            (None, _) => None,
        };
        let call = Expr::Call(CallExpr { func_name: func_name.clone(), target, args });
        // The entries that a loop collects were measured when they were built.
        let grows = func_name == operators::ADD && !appends
            || !is_operator(&func_name) && !SMALL_RESULT.contains(&func_name.as_str());
        Ok(if grows { built(call) } else { call })
    }

    fn comprehension(&mut self, comprehension: ComprehensionExpr) -> Result<Expr, String> {
        let ComprehensionExpr {
            iter_range,
            iter_var,
            iter_var2,
            accu_var,
            accu_init,
            loop_cond,
            loop_step,
            result,
        } = comprehension;
        let iter_range = self.rewrite(iter_range)?;
        let accu_init = self.rewrite(accu_init)?;
        self.loops += 1;
        if self.loops > LOOPS_MAX {
            return Err(format!("it has more than {LOOPS_MAX} nested loops"));
        }
        let outside = self.scope.len();
        self.scope.extend([iter_var.clone(), accu_var.clone()]);
        self.scope.extend(iter_var2.clone());
        let loop_cond = wrapped(TURN, self.rewrite(loop_cond)?);
        let loop_step = self.rewrite(loop_step)?;
        let result = self.rewrite(result)?;
        self.scope.truncate(outside);
        self.loops -= 1;
        Ok(Expr::Comprehension(Box::new(ComprehensionExpr {
            iter_range,
            iter_var,
            iter_var2,
            accu_var,
            accu_init,
            loop_cond,
            loop_step,
            result,
        })))
    }
}

/// The most levels of an expression that the interpreter enters at once.
fn levels(expression: &IdedExpr) -> usize {
    fn deepest<'a>(below: impl IntoIterator<Item = &'a IdedExpr>) -> usize {
        below.into_iter().map(levels).max().unwrap_or(0)
    }
    1 + match &expression.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) | Expr::Struct(_) => 0,
        Expr::Select(select) => levels(&select.operand),
        Expr::List(list) => deepest(&list.elements),
        Expr::Map(map) => deepest(map.entries.iter().flat_map(|entry| match &entry.expr {
            EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
            EntryExpr::StructField(field) => vec![&field.value],
        })),
        Expr::Call(call) => deepest(call.target.as_deref().into_iter().chain(&call.args)),
        Expr::Comprehension(comprehension) => {
            let ComprehensionExpr { iter_range, accu_init, loop_cond, loop_step, result, .. } =
                &**comprehension;
            deepest([iter_range, accu_init, loop_cond, loop_step, result])
        }
    }
}

/// A field access by name. Selecting copies the value with everything below it, and gives `false` for a value
/// without fields; indexing borrows the value, and fails if it has no fields.
fn indexed(operand: IdedExpr, field: String) -> Expr {
    let field = IdedExpr { id: 0, expr: Expr::Literal(LiteralValue::String(field.into())) };
    let args = vec![operand, field];
    Expr::Call(CallExpr { func_name: operators::INDEX.to_owned(), target: None, args })
}

fn wrapped(function: &str, expression: IdedExpr) -> IdedExpr {
    let call = CallExpr { func_name: function.to_owned(), target: None, args: vec![expression] };
    IdedExpr { id: 0, expr: Expr::Call(call) }
}

fn built(expression: Expr) -> Expr {
    // A list of constants is only as large as it was written.
    let constant = |element: &IdedExpr| matches!(element.expr, Expr::Literal(_));
    match &expression {
        Expr::List(list) if list.elements.iter().all(constant) => expression,
        _ => wrapped(BUILT, IdedExpr { id: 0, expr: expression }).expr,
    }
}

fn is_operator(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// Asks the library itself, which cannot list its functions: a call to an unknown one fails before anything
/// happens.
fn is_known(name: &str) -> bool {
    let call = CallExpr { func_name: name.to_owned(), target: None, args: Vec::new() };
    let call = IdedExpr { id: 0, expr: Expr::Call(call) };
    let until = Instant::now() + std::time::Duration::from_secs(1);
    let answer = meter::metered(until, || catch_unwind(AssertUnwindSafe(|| meter::library().resolve(&call))));
    !matches!(answer, Some(Ok(Err(ExecutionError::UndeclaredReference(_)))))
}

/// A pattern that is built at run time could ask for a billion digits.
fn check_format(pattern: Option<&IdedExpr>) -> Result<(), String> {
    match pattern.map(|pattern| &pattern.expr) {
        Some(Expr::Literal(LiteralValue::String(pattern)))
            if !meter::is_excessive_format(pattern.inner()) =>
        {
            Ok(())
        }
        Some(Expr::Literal(_)) => Err("the pattern of format asks for more than 99 digits".to_owned()),
        _ => Err("format needs a literal text as its pattern".to_owned()),
    }
}

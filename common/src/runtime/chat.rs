//! A file's own chat template.

use anyhow::{Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};
use minijinja_contrib::pycompat;

use super::gguf::Gguf;

/// Renders one message of a user, and the opening of the answer, by the file's template.
///
/// # Errors
/// A file without a template, a template that does not compile or refuses the message.
pub fn render(gguf: &Gguf, message: &str) -> Result<String> {
    let template = gguf.str("tokenizer.chat_template").context("--chat")?;
    let token = |key: &str| -> Result<String> {
        let Some(id) = gguf.get(key) else {
            return Ok(String::new());
        };
        let tokens = gguf.key("tokenizer.ggml.tokens")?.strs()?;
        Ok(tokens
            .get(id.usize()?)
            .copied()
            .unwrap_or_default()
            .to_owned())
    };
    let mut environment = Environment::new();
    // As the library that templates are written for: block tags leave no blank lines, and strings have Python's methods.
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .context("chat: syntax")?;
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |why: String| -> Result<(), Error> {
        Err(Error::new(ErrorKind::InvalidOperation, why))
    });
    let rendered = environment.render_str(
        template,
        context! {
            messages => [context! { role => "user", content => message }],
            add_generation_prompt => true,
            bos_token => token("tokenizer.ggml.bos_token_id")?,
            eos_token => token("tokenizer.ggml.eos_token_id")?,
        },
    );
    rendered.with_context(|| format!("{}: key tokenizer.chat_template", gguf.file()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::gguf::Writer;

    fn file(template: Option<&str>) -> Gguf {
        let mut writer = Writer::new();
        if let Some(template) = template {
            writer.set_str("tokenizer.chat_template", template).unwrap();
        }
        writer
            .set_strs("tokenizer.ggml.tokens", &["<a>", "<b>"])
            .unwrap();
        writer.set("tokenizer.ggml.eos_token_id", 1u32).unwrap();
        let mut bytes = Vec::new();
        writer.write_to(&mut bytes, |_, _| Ok(())).unwrap();
        Gguf::from_bytes("chat.gguf", bytes).unwrap()
    }

    #[test]
    fn a_template_is_rendered_as_python_would() {
        let template = "{%- for m in messages %}\n    {% if m.content.startswith('x') %}\n{{ m.role }}: {{ m.content[::-1].strip() }}{{ eos_token }}\n    {% endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}>{% endif %}";
        assert_eq!(
            render(&file(Some(template)), "x  ab ").unwrap(),
            "user: ba  x<b>\n>"
        );
    }

    #[test]
    fn what_does_not_render_is_refused_in_one_line() {
        let error = |template| format!("{:#}", render(&file(template), "hi").unwrap_err());
        assert_eq!(
            error(None),
            "--chat: chat.gguf: key tokenizer.chat_template is missing"
        );
        assert!(
            error(Some("{% if %}"))
                .starts_with("chat.gguf: key tokenizer.chat_template: syntax error")
        );
        let refused = error(Some("{{ raise_exception('only tools') }}"));
        assert!(
            refused.contains("only tools") && !refused.contains('\n'),
            "{refused}"
        );
    }
}

//! An OpenAI-compatible endpoint, if `OPENAI_BASE_URL` names one. The workers have no network: they ask over their stdout, and this
//! side of it asks the endpoint, with `curl`. When it does not answer, the worker's own rules do the work.

use e2e::Invocation;
use serde_json::{Value, json};
use std::time::Duration;

/// Whether there is an endpoint to ask.
pub(crate) fn is_configured() -> bool {
    std::env::var_os("OPENAI_BASE_URL").is_some_and(|url| !url.is_empty())
}

/// Asks it. The answer has `content`, or `unreachable` with the reason.
pub(crate) fn ask(prompt: &str) -> Value {
    match complete(prompt) {
        Ok(content) => json!({ "content": content }),
        Err(error) => {
            crate::say(format!("the model did not answer, rules do: {error:#}"));
            json!({ "unreachable": error.to_string() })
        }
    }
}

fn complete(prompt: &str) -> anyhow::Result<String> {
    let base = std::env::var("OPENAI_BASE_URL")?;
    let model = std::env::var("OPENAI_MODEL").unwrap_or_else(|_| "gpt-4o-mini".into());
    let body = json!({ "model": model, "messages": [{ "role": "user", "content": prompt }] });
    let url = format!("{}/chat/completions", base.trim_end_matches('/'));
    // The key and the body go through stdin: arguments are visible to everyone.
    let mut config = format!("url = {}\nheader = \"Content-Type: application/json\"\n", json!(url));
    if let Ok(key) = std::env::var("OPENAI_API_KEY") {
        config += &format!("header = {}\n", json!(format!("Authorization: Bearer {key}")));
    }
    config += &format!("data = {}\n", json!(body.to_string()));
    let answer = Invocation::new("curl")
        .args([
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "60",
            "--config",
            "-",
        ])
        .stdin(config)
        .deadline(Duration::from_secs(90))
        .succeed()?;
    let answer: Value = serde_json::from_slice(&answer.stdout)?;
    let content = answer["choices"][0]["message"]["content"].as_str();
    content
        .map(str::to_owned)
        .ok_or_else(|| anyhow::anyhow!("no content in the answer"))
}
